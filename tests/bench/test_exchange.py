"""The exchange bench runs on processes with Triton's interpreter, and finds our sums right."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from millrace_bench import exchange, exchange_ways, processes
from millrace_bench.exchange import measure, run
from millrace_load.record import Row
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from model.ranks import run_jobs

triton_interpreter.install()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.cuda.is_available(), reason="it would need a GPU per rank"),
]


CPU = torch.device("cpu")
ARGS = argparse.Namespace(ranks=2, rows=[1, 3], width=256, repeats=1, polls=5, few=None)
UNEVEN = argparse.Namespace(**{**vars(ARGS), "rows": [3], "few": 1})


def broken(args: argparse.Namespace, dims: ParallelDims, device: torch.device) -> Iterator[Row]:
    yield {"way": "broken", "rows": 1, "us": 1.0 + dims.rank}
    if dims.rank == 1:
        raise RuntimeError("no graph")
    yield {"way": "broken", "rows": 3, "us": 1.0}
    yield {"way": "broken", "rows": 5, "us": 1.0}


def job(dims: ParallelDims) -> list[list[Row]]:
    processes.CALLS = 1
    exchange.FAMILIES["broken"] = broken
    runs = [(family, ARGS) for family in ("ours", "gather", "broken")] + [("ours", UNEVEN), ("gather", UNEVEN)]
    return [list(measure(family, args, dims, CPU)) for family, args in runs]


def sums(dims: ParallelDims) -> list[torch.Tensor]:
    return [call() for call in exchange_ways.gather(exchange.case(3, dims, UNEVEN, CPU).padded()).values()]


def test_two_ranks(tmp_path: Path) -> None:
    results, (first, last) = run_jobs([(1, 2, job, ()), (1, 2, sums, ())], tmp_path)
    assert results[0] == results[1]
    ours, gather, stopped, uneven, padded = results[0]
    assert [row["right"] for row in ours if row["way"] == "right"] == [True] * 2
    assert {row["way"] for row in ours} == {"right", "dispatch", "both", "both_norm", "poll"}
    assert [(row["way"], row["rows"]) for row in gather] == [(w, n) for n in (1, 3) for w in ("gather", "all_reduce")]
    assert [row["right"] for row in uneven if row["way"] == "right"] == [True]
    assert {"both", "both_padded"} < {row["way"] for row in uneven} and len(padded) == 2
    assert torch.equal(*first) and torch.equal(*last) and not last[0][1:].any() and last[0].any()
    assert stopped == [{"way": "broken", "rows": 1, "us": 2.0}, {"way": "broken", "error": "RuntimeError: no graph"}]


def test_processes_of_a_family() -> None:
    rows = run("gather", ARGS, 60.0)
    assert [row["rows"] for row in rows] == [1, 1, 3, 3]
    (row,) = run("symm", ARGS, 0.5)
    assert row == {"way": "symm", "error": "it was not over after 0 s"}
