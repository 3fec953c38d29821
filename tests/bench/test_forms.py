"""The bench that finds the attention-form threshold: its arithmetic, and that it runs."""

import json
import sys

import pytest
from millrace_bench.kernels import forms


def test_the_break_even_lies_between_two_measured_numbers() -> None:
    assert forms.break_even({16: 1.0, 32: 2.0}, {16: 2.0, 32: 1.0}) == 24.0
    assert forms.break_even({16: 1.0, 32: 2.0, 64: 9.0}, {16: 1.5, 32: 2.5, 64: 2.5}) == 34.3


def test_one_form_may_always_win() -> None:
    assert forms.break_even({16: 1.0, 32: 2.0}, {16: 2.0, 32: 3.0}) is None
    assert forms.break_even({16: 3.0, 32: 4.0}, {16: 2.0, 32: 3.0}) == 16


def test_noise_before_the_last_crossing_does_not_count() -> None:
    assert forms.break_even({8: 2.0, 16: 1.0, 32: 2.0}, {8: 1.0, 16: 2.0, 32: 1.0}) == 24.0


def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--heads", "2", "--prefix", "128", "--queries", "8", "16", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["forms", "--tiny", *options])
    forms.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    sizes = [("absorbed", 8), ("absorbed", 16), ("expanded", 8), ("expanded", 16)]
    assert [(row["form"], row["queries"]) for row in results["rows"]] == sizes
    assert all(row["ms"] > 0 for row in results["rows"])
    assert [(one["heads"], one["prefix"]) for one in results["break_even"]] == [(2, 128)]
