"""The bench of sums over ranks with two ranks on a CPU; its times mean nothing there."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from millrace_bench import allreduce, processes
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from model.ranks import run_jobs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it would need a GPU per rank")


def measured(dims: ParallelDims) -> list[dict[str, Any]]:
    triton_interpreter.install()
    processes.CALLS = 1
    return allreduce.measure(dims, torch.device("cpu"), argparse.Namespace(rows=[1, 20], width=256, repeats=1))


@pytest.mark.long
def test_every_way_gives_the_same(tmp_path: Path) -> None:
    rows, _ = run_jobs([(2, 1, measured, ())], tmp_path)[0]
    assert [(row["rows"], row["form"]) for row in rows[::4]] == [(1, "plain"), (20, "plain"), (20, "fp8"), (20, "both")]
    assert {row["way"] for row in rows} == {"one_shot", "two_shot", "nccl", "norm"}
    for row in rows:
        assert row["us"] > 0
        if row["way"] != "norm":
            assert row["same"] and row["error"] < (0.004 if row["form"] == "plain" else 0.03)
