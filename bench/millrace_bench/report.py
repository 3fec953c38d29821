"""From the samples of a load run to its figures, its table, and whether requests met their objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from millrace_bench.clients import Sample
from millrace_bench.common import Summary


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None: no limit. A request meets it when all its figures are at or below."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """ "ttft=0.5,tpot=0.05". ValueError names what is wrong."""
        limits: dict[str, float] = {}
        for item in filter(None, text.split(",")):
            key, _, value = item.partition("=")
            if key not in ("ttft", "tpot", "e2e"):
                raise ValueError(f"SLO {item!r}: the figures are ttft, tpot and e2e")
            try:
                limits[key] = float(value)
            except ValueError:
                raise ValueError(f"SLO {item!r} is not of the form {key}=SECONDS") from None
        return cls(**limits)

    def met_by(self, sample: Sample) -> bool:
        pairs = ((self.ttft, sample.ttft), (self.tpot, sample.tpot), (self.e2e, sample.e2e))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Report:
    """Seconds and per second. Only complete requests count, but for `errors`."""

    completed: int
    errors: dict[str, int]  # by reason
    seconds: float  # from the first request's due time to the last one's end
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int  # of these
    request_rate: float
    output_token_rate: float
    total_token_rate: float
    goodput: float  # requests per second that met the SLO
    slo_met: float  # their fraction of all requests
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2e: Summary

    @classmethod
    def of(cls, samples: Sequence[Sample], slo: Slo) -> Report:
        good = [sample for sample in samples if not sample.error and sample.arrivals]
        errors = Counter(sample.error or "EMPTY" for sample in samples if sample.error or not sample.arrivals)
        seconds = max(sample.end for sample in samples) - min(sample.due for sample in samples)
        prompt_tokens = sum(sample.prompt_tokens for sample in good)
        output_tokens = sum(sample.output_tokens for sample in good)
        met = sum(slo.met_by(sample) for sample in good)
        return cls(
            completed=len(good),
            errors=dict(errors),
            seconds=seconds,
            prompt_tokens=prompt_tokens,
            cached_tokens=sum(sample.cached_tokens for sample in good),
            output_tokens=output_tokens,
            drafted_tokens=sum(sample.drafted_tokens for sample in good),
            accepted_tokens=sum(sample.accepted_tokens for sample in good),
            request_rate=len(good) / seconds,
            output_token_rate=output_tokens / seconds,
            total_token_rate=(prompt_tokens + output_tokens) / seconds,
            goodput=met / seconds,
            slo_met=met / len(samples),
            ttft=Summary.of([sample.ttft for sample in good]),
            tpot=Summary.of([sample.tpot for sample in good if sample.tpot is not None]),
            itl=Summary.of([gap for sample in good for gap in sample.gaps]),
            e2e=Summary.of([sample.e2e for sample in good]),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def latency_table(report: Report) -> Table:
    table = Table("milliseconds", "mean", "p50", "p90", "p99", title="Latency", title_justify="left")
    for name, summary in (("TTFT", report.ttft), ("TPOT", report.tpot), ("ITL", report.itl), ("E2E", report.e2e)):
        table.add_row(name, *(f"{1000 * value:.2f}" for value in asdict(summary).values()))
    return table


def throughput_table(report: Report, slo: Slo) -> Table:
    table = Table("", "", title="Throughput", title_justify="left", show_header=False)
    table.add_row("requests completed", f"{report.completed} in {report.seconds:.2f} s")
    for reason, count in sorted(report.errors.items()):
        table.add_row(f"  failed: {reason}", str(count))
    table.add_row("requests per second", f"{report.request_rate:.2f}")
    table.add_row("output tokens per second", f"{report.output_token_rate:.1f}")
    table.add_row("prompt + output tokens per second", f"{report.total_token_rate:.1f}")
    cached = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    table.add_row("prompt tokens from the prefix cache", f"{cached:.1%}")
    if report.drafted_tokens:
        table.add_row("drafts accepted", f"{report.accepted_tokens / report.drafted_tokens:.1%}")
    if slo != Slo():
        table.add_row("goodput (requests per second in SLO)", f"{report.goodput:.2f} ({report.slo_met:.1%})")
    return table
