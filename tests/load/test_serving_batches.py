"""Figures of a batch from samples that are easy to check by hand."""

import math

import pytest
from millrace_load.clients import Sample
from millrace_load.serving_batches import Row

FAST = Sample(due=1.0, arrivals=[1.5, 2.0, 2.5], prompt_tokens=10, output_tokens=3, end=2.6)
LATE = Sample(due=1.0, arrivals=[2.0, 5.0], prompt_tokens=30, output_tokens=5, end=5.0)
FAILED = Sample(due=1.0, end=1.1, error="QUEUE_FULL")


def test_figures() -> None:
    row = Row.of([FAST, LATE, FAILED])
    assert (row.batch, row.errors, row.input_tokens, row.output_tokens) == (3, 1, 40, 8)
    assert (row.ttft, row.latency) == (pytest.approx(1.0), pytest.approx(4.0))
    assert row.itl == pytest.approx((0.5 + 0.75) / 2)
    assert row.input_throughput == pytest.approx(40)
    assert row.output_throughput == pytest.approx(6 / 3)
    assert row.overall_throughput == pytest.approx(48 / 4)


def test_a_batch_without_answers_has_no_figures() -> None:
    row = Row.of([FAILED])
    assert row.errors == 1
    assert all(math.isnan(value) for value in (row.latency, row.itl, row.input_throughput, row.output_throughput))
