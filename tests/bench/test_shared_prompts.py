"""The bench of one long prompt on two replicas, on a CPU; its times mean nothing there."""

from __future__ import annotations

import argparse

import pytest
import torch
from millrace_bench import shared_prompts


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take the GPUs")
def test_both_ways_leave_the_same_kv() -> None:
    args = argparse.Namespace(
        ranks=2, prompt=192, prefill_tokens=[128], layers=2, experts=16, busy=[1], exchange="gather", repeats=1,
        tiny=True, profile=False, decode=[], prefill=[],
    )  # fmt: skip
    rows = shared_prompts.run(args)
    assert [(row["way"], row["busy"]) for row in rows] == [("own", 0), ("shared", 0), ("own", 1), ("shared", 1)]
    for row in rows:
        assert row["ms"] > 0 and (row["busy"] == 0 or row["others_ms"] > 0)
        assert row["kv_error"][0] == 0.0 and row["kv_error"][1] < 0.1, "one layer of FP8 rounding"
