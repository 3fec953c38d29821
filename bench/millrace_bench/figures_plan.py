"""Predictions of `millrace plan` beside runs that are not in its table of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from millrace_load.record import Row
from millrace_serve.plan import predict
from millrace_serve.plan.predict import StepRanks

ONE, TP8 = StepRanks("H200", "ep8", 1, 61), StepRanks("H200", "tp8", 1, 61)
TWO_28, H100 = StepRanks("H200", "ep8", 2, 28), StepRanks("H100", "ep8", 2, 28)
SEEDS = "h100/node-seeds-1-512"  # 256 sequences of each GPU, of 1 to 513 tokens


Read = Callable[..., Any]  # figures.row and figures.results


def _decode(row: Read, results: Read) -> Iterator[tuple[str, StepRanks, int, int, float, str]]:
    """Set-up, ranks, sequences, context, measured ms, run."""
    bf16, drafts = "h200/auto-kv-bf16", "h200/auto-drafts-dp2"
    two = "2 × H200, dp = 2, 28 layers"
    for count, length in ((256, 2048), (128, 4096), (64, 2048)):
        yield two, TWO_28, count, length, row(bf16, kind="decode", count=count, length=length)["ms"], bf16
    for count in (32, 8):
        yield two, TWO_28, count, 2048, row(drafts, count=count, drafts=0)["ms"], drafts
    alone = "1 × H200, an EP8 rank"
    yield alone, ONE, 128, 4032, row("h200/drafts-ep8", kind="decode", drafts=0)["step_ms"], "h200/drafts-ep8"
    for context in (1024, 4096):
        run = "h200/peers-engines-third"
        yield alone, ONE, 1, context, row(run, case=f"decode 1x{context}")["ours_ms"], run
    run = "h200/drafts-serving"
    yield "2 × H200, one prefill and one decode worker, one client", ONE, 1, 4224, row(run, drafts=0)["tpot_ms"], run
    yield (
        "1 × H200, a TP8 rank",
        TP8,
        1,
        1024,
        row("h200/engine-tp8", kind="decode", variant="graph")["step_ms"],
        ("h200/engine-tp8"),
    )
    run = "h100/node-drafts"
    yield "2 × H100, dp = 2, 28 layers", H100, 128, 4096, row(run, drafts=0)["ms"], run
    yield "2 × H100, dp = 2, 28 layers, 512 clients", H100, 256, 257, results(SEEDS)["tpot"]["p50"] * 1e3, SEEDS


def _prefill(row: Read, results: Read) -> Iterator[tuple[str, StepRanks, int, float, str]]:
    """Set-up, ranks, length, measured prompt tokens per second of a GPU, run."""
    run = "h200/auto-kv-bf16"
    yield "2 × H200, dp = 2, 28 layers", TWO_28, 4096, row(run, kind="prefill")["tokens_per_s"] / 2, run
    run = "h200/peers-engines-third"
    yield "1 × H200, an EP8 rank", ONE, 4096, 16384e3 / row(run, case="prefill 4x4096")["ours_ms"], run
    run = "h100/node-seeds-512-1"
    found = results(run)["input_token_throughput"] / 2
    yield "2 × H100, dp = 2, 28 layers, 512 clients", H100, 512, found, run


def plan_rows(row: Read, results: Read) -> Iterator[Row]:
    """Set-up, step, predicted and measured figure (None: no prediction), unit and run of each."""
    for setup, ranks, rows, context, ms, run in _decode(row, results):
        found = predict.decode(ranks, rows, context)
        yield _line(setup, f"decode {rows} × {context:,}", found.ms if found else None, ms, "ms", run)
    for setup, ranks, length, rate, run in _prefill(row, results):
        token = predict.prefill(ranks, length)
        yield _line(setup, f"prompts of {length:,}", 1e3 / token.ms if token else None, rate, "tokens/s", run)


def _line(setup: str, step: str, predicted: float | None, measured: float, unit: str, run: str) -> Row:
    return {"setup": setup, "step": step, "predicted": predicted, "measured": measured, "unit": unit, "run": run}
