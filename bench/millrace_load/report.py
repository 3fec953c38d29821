"""From the samples of a load run to its figures, its table, and whether requests met their objective.

Names and definitions are AIPerf's (docs/how-to/load-test.md maps them to other tools').
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from millrace_load.clients import Sample
from millrace_load.record import Summary

OF_TURN = (
    *("completed", "errors", "prompt_tokens", "cached_tokens", "cached_share", "output_tokens"),
    *("host_cached_tokens", "fetched_tokens"),
    *("ttft", "tpot", "itl", "icl", "request_latency", "interactivity"),
)
LIMITS = ("ttft", "tpot", "request_latency")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None: no limit. A request meets it when all its figures are at or below."""

    ttft: float | None = None
    tpot: float | None = None
    request_latency: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """ "ttft=0.5,tpot=0.05". ValueError names what is wrong."""
        limits: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in LIMITS:
                raise ValueError(f"SLO {item!r}: the figures are {', '.join(LIMITS)}")
            try:
                limits[key] = float(value)
                assert 0 < limits[key] < math.inf
            except (AssertionError, ValueError):
                raise ValueError(f"SLO {item!r} is not of the form {key}=SECONDS, above 0") from None
        return cls(**limits)

    def met_by(self, sample: Sample) -> bool:
        pairs = ((self.ttft, sample.ttft), (self.tpot, sample.tpot), (self.request_latency, sample.latency))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Report:
    """Seconds and per second. Only complete requests count, but for `errors`."""

    completed: int
    errors: dict[str, int]  # by reason
    seconds: float  # from the first request's due time to the last one's end
    prompt_tokens: int
    cached_tokens: int
    cached_share: float  # of the prompt tokens
    host_cached_tokens: int  # of the cached ones, from the host tier; only gRPC says it
    fetched_tokens: int  # of the cached ones, from another worker; only gRPC says it
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int  # of these
    request_throughput: float
    input_token_throughput: float
    output_token_throughput: float
    total_token_throughput: float
    concurrency: float  # requests in flight, the mean over `seconds`
    goodput: float  # requests per second that met the SLO
    slo_met: float  # their fraction of all requests
    ttft: Summary
    tpot: Summary  # of requests: each has one value; also called ITL
    icl: Summary  # of the gaps between messages: inter-chunk latency
    request_latency: Summary
    interactivity: Summary  # output tokens / request_latency: the p90 is what nine of ten requests reach
    gpu_output_token_throughput: float | None  # for each GPU

    @classmethod
    def of(cls, samples: Sequence[Sample], slo: Slo, gpus: int = 0) -> Report:
        """`gpus` that served; 0: not known."""
        good = [sample for sample in samples if sample.answered]
        errors = Counter(sample.error or "EMPTY" for sample in samples if not sample.answered)
        seconds = max(sample.end for sample in samples) - min(sample.due for sample in samples)
        prompt_tokens = sum(sample.prompt_tokens for sample in good)
        output_tokens = sum(sample.output_tokens for sample in good)
        cached_tokens = sum(sample.cached_tokens for sample in good)
        met = sum(slo.met_by(sample) for sample in good)
        return cls(
            completed=len(good),
            errors=dict(errors),
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            cached_share=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
            host_cached_tokens=sum(sample.host_cached_tokens for sample in good),
            fetched_tokens=sum(sample.fetched_tokens for sample in good),
            output_tokens=output_tokens,
            drafted_tokens=sum(sample.drafted_tokens for sample in good),
            accepted_tokens=sum(sample.accepted_tokens for sample in good),
            request_throughput=len(good) / seconds,
            input_token_throughput=prompt_tokens / seconds,
            output_token_throughput=output_tokens / seconds,
            total_token_throughput=(prompt_tokens + output_tokens) / seconds,
            concurrency=sum(sample.latency for sample in good) / seconds,
            goodput=met / seconds,
            slo_met=met / len(samples),
            ttft=Summary.of([sample.ttft for sample in good]),
            tpot=Summary.of([sample.tpot for sample in good if sample.tpot is not None]),
            icl=Summary.of([gap for sample in good for gap in sample.gaps]),
            request_latency=Summary.of([sample.latency for sample in good]),
            interactivity=Summary.of([it.latency / it.output_tokens for it in good if it.output_tokens]).inverse,
            gpu_output_token_throughput=output_tokens / seconds / gpus if gpus else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """With TPOT under both of its names."""
        return asdict(self) | {"itl": asdict(self.tpot)}

    def of_turn(self) -> dict[str, Any]:
        """Without what only says something of a whole run."""
        return {name: value for name, value in self.as_dict().items() if name in OF_TURN}


def by_turn(samples: Sequence[Sample], slo: Slo) -> list[Report]:
    """Of the first turns of all conversations, of their second turns, …"""
    last = max(sample.turn for sample in samples)
    return [Report.of([sample for sample in samples if sample.turn == turn], slo) for turn in range(last + 1)]


def turn_table(reports: Sequence[Report]) -> Table:
    columns = "turn", "prompt", "cached", "host", "fetched", "TTFT p50", "p90", "p99", "TPOT", "gap p99", "tok/s", "p90"
    table = Table(*columns, title="Turns: tokens, milliseconds", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for turn, report in enumerate(reports, 1):
        tiers = report.cached_tokens, report.host_cached_tokens, report.fetched_tokens
        firsts, rates = (report.ttft.p50, report.ttft.p90, report.ttft.p99), report.interactivity
        table.add_row(
            *(str(turn), f"{report.prompt_tokens / max(report.completed, 1):.0f}"),
            *(f"{tokens / max(report.prompt_tokens, 1):.0%}" for tokens in tiers),
            *(f"{1000 * value:.0f}" for value in firsts),
            *(f"{value:.1f}" for value in (1000 * report.tpot.p50, 1000 * report.icl.p99, rates.p50, rates.p90)),
        )
    return table


def latency_table(report: Report) -> Table:
    table = Table("milliseconds", "mean", "p50", "p90", "p95", "p99", title="Latency", title_justify="left")
    rows = {
        "time to first token (TTFT)": report.ttft,
        "inter-token latency (ITL, TPOT)": report.tpot,
        "inter-chunk latency": report.icl,
        "request latency": report.request_latency,
    }
    for name, summary in rows.items():
        table.add_row(name, *(f"{1000 * value:.2f}" for value in asdict(summary).values()))
    return table


def throughput_table(report: Report, slo: Slo) -> Table:
    table = Table("", "", title="Throughput", title_justify="left", show_header=False)
    table.add_row("requests completed", f"{report.completed} in {report.seconds:.2f} s")
    for reason, count in sorted(report.errors.items()):
        table.add_row(f"  failed: {reason}", str(count))
    table.add_row("requests per second", f"{report.request_throughput:.2f}")
    table.add_row("input tokens per second", f"{report.input_token_throughput:.1f}")
    table.add_row("output tokens per second", f"{report.output_token_throughput:.1f}")
    table.add_row("input + output tokens per second", f"{report.total_token_throughput:.1f}")
    if report.gpu_output_token_throughput is not None:
        table.add_row("output tokens per second and GPU", f"{report.gpu_output_token_throughput:.1f}")
    table.add_row("E2E interactivity (p50, p90)", f"{report.interactivity.p50:.1f}, {report.interactivity.p90:.1f}")
    table.add_row("mean concurrency", f"{report.concurrency:.1f}")
    table.add_row("input tokens from the prefix cache", f"{report.cached_share:.1%}")
    if report.drafted_tokens:
        table.add_row("drafts accepted", f"{report.accepted_tokens / report.drafted_tokens:.1%}")
    if slo != Slo():
        table.add_row("goodput (requests per second in SLO)", f"{report.goodput:.2f} ({report.slo_met:.1%})")
    return table
