"""The model of 8 and 72 GPUs gives the measurements back for two."""

import pytest
from millrace_bench import scaling
from millrace_bench.figures import rows
from millrace_bench.scaling import Fit


def test_the_fit_goes_through_points_on_a_line() -> None:
    rows = [{"way": "both", "rows": num, "us": 10 + 0.05 * num} for num in (1, 8, 128, 4096)]
    fit = Fit.of([*rows, {"way": "dispatch", "rows": 1, "us": 3.0}])
    assert (fit.fixed, fit.per_row) == pytest.approx((10, 0.05))
    assert fit.us(100, 3.5) == pytest.approx(27.5)


def test_two_gpus_are_what_was_measured_and_more_exchange_more() -> None:
    size = {"kind": "decode", "count": 128, "length": 4096}
    ranks = [{**size, "exchange": "none", "ms": 48.0}, {**size, "exchange": "peer", "ms": 52.0}]
    two, eight, many = scaling.steps(Fit(10.0, 0.065), ranks)
    assert (two.gpus, two.ms, two.exchange_ms) == (2, pytest.approx(52.0), pytest.approx(4.0))
    assert eight.ms - two.ms == pytest.approx(58 * 0.065 * 128 * 2.5 / 1e3)
    assert many.exchange_ms > eight.exchange_ms and many.ms - many.exchange_ms < two.ms - two.exchange_ms
    assert two.tokens_per_s == pytest.approx(128 / 0.052)


def test_few_rows_read_weights_and_many_compute() -> None:
    read = scaling.experts_us(33, 1)
    assert read == pytest.approx(397, rel=0.01), "33 experts, as measured"
    assert scaling.experts_us(33, 2) == read < scaling.experts_us(33, 100_000)


def test_the_committed_measurements_fit() -> None:
    fit = Fit.of(rows("h200/exchange"))
    found = scaling.steps(fit, rows("h200/ranks"))
    assert 5 < fit.fixed < 15 and 0.04 < fit.per_row < 0.1
    assert {step.gpus for step in found} == {2, 8, 72} and all(step.exchange_ms > 0 for step in found)
