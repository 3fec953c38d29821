"""Figures of a load run from samples that are easy to check by hand."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_load.clients import Sample
from millrace_load.record import Summary
from millrace_load.report import Report, Slo, by_turn, latency_table, throughput_table, turn_table
from rich.console import Console

FAST = Sample(due=10.0, arrivals=[10.2, 10.3, 10.4], prompt_tokens=8, cached_tokens=4, output_tokens=3, end=10.4)
SLOW = Sample(due=10.0, arrivals=[11.0, 13.0], prompt_tokens=8, output_tokens=5, end=14.0)
SHORT = Sample(due=10.0, arrivals=[10.5], prompt_tokens=8, output_tokens=1, end=10.5)
FAILED = Sample(due=10.0, end=10.1, error="QUEUE_FULL")
NOTHING = Sample(due=10.0, end=10.1)
ALL = [FAST, SLOW, SHORT, FAILED, NOTHING]


def test_figures() -> None:
    report = Report.of(ALL, Slo(), gpus=2)
    assert report.completed == 3
    assert report.errors == {"QUEUE_FULL": 1, "EMPTY": 1}
    assert report.seconds == pytest.approx(4.0)
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (24, 4, 9)
    assert report.cached_share == pytest.approx(4 / 24)
    assert report.request_throughput == pytest.approx(0.75)
    assert report.input_token_throughput == pytest.approx(24 / 4)
    assert report.output_token_throughput == pytest.approx(9 / 4)
    assert report.total_token_throughput == pytest.approx(33 / 4)
    assert report.concurrency == pytest.approx((0.4 + 3.0 + 0.5) / 4)
    assert report.ttft.p50 == pytest.approx(0.5)
    assert report.tpot.mean == pytest.approx((0.1 + 0.5) / 2), "one token has no time per further token"
    assert report.as_dict()["itl"] == report.as_dict()["tpot"]
    assert report.icl.mean == pytest.approx((0.1 + 0.1 + 2.0) / 3)
    assert report.request_latency.p50 == pytest.approx(0.5)
    assert report.request_latency.p99 == pytest.approx(0.5 + 0.98 * 2.5), "until the last token, not the end"
    assert report.interactivity.p50 == pytest.approx(1 / 0.5) and report.interactivity.p90 == pytest.approx(1 / 0.58)
    assert report.gpu_output_token_throughput == pytest.approx(9 / 4 / 2)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20), st.integers(2, 50))
def test_inter_token_latency_is_aiperfs(gaps: list[float], tokens: int) -> None:
    """(request latency - TTFT) / (tokens - 1)."""
    arrivals = list(itertools.accumulate(gaps, initial=1.0))
    report = Report.of([Sample(due=0.5, arrivals=arrivals, output_tokens=tokens, end=arrivals[-1] + 1)], Slo())
    assert report.tpot.p50 == pytest.approx((report.request_latency.p50 - report.ttft.p50) / (tokens - 1))


@pytest.mark.parametrize(
    ("text", "met"), [("", 3), ("ttft=0.5", 2), ("tpot=0.11", 2), ("ttft=0.3,tpot=0.2", 1), ("request_latency=0.45", 1)]
)
def test_goodput_counts_requests_that_meet_every_limit(text: str, met: int) -> None:
    report = Report.of(ALL, Slo.parse(text))
    assert report.goodput == pytest.approx(met / 4)
    assert report.slo_met == pytest.approx(met / 5)


@pytest.mark.parametrize("text", ["ttf=1", "ttft", "ttft=fast", "ttft=1;tpot=2"])
def test_bad_slo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SLO"):
        Slo.parse(text)


def test_all_failed_is_a_report_too() -> None:
    report = Report.of([FAILED], Slo())
    assert (report.completed, report.request_throughput) == (0, 0)


def test_turns_are_reported_apart() -> None:
    first, second = by_turn([replace(FAST, turn=1), SLOW, replace(FAILED, turn=1), SHORT], Slo())
    assert (first.completed, first.cached_share) == (2, 0.0)
    assert (second.completed, second.errors, second.cached_share) == (1, {"QUEUE_FULL": 1}, 0.5)
    assert second.of_turn()["ttft"]["p50"] == pytest.approx(0.2) and "goodput" not in second.of_turn()
    second = replace(
        second,
        ttft=Summary(*[123.4] * 5),
        icl=Summary(*[12.3] * 5),
        prompt_tokens=158_148,
        host_cached_tokens=79_074,
        fetched_tokens=15_815,
    )
    with (console := Console(width=80)).capture() as capture:
        console.print(turn_table([first, second]))
    assert {"158148", "50%", "10%", "123400", "12300.0"} <= set(capture.get().split()) and "…" not in capture.get()


def test_tables_show_figures_and_errors() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        report = Report.of(ALL, Slo.parse("ttft=0.5"))
        console.print(latency_table(report), throughput_table(report, Slo.parse("ttft=0.5")))
    for text in ("TTFT", "ITL", "p95", "500.00", "QUEUE_FULL", "goodput", "0.50 (40.0%)", "input tokens per second"):
        assert text in capture.get()
