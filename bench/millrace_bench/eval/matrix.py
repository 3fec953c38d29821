"""Every way to serve a checkpoint, on the same items, against transformers or, on a GPU, our engine on the CPU.

    millrace eval matrix --checkpoint models/tiny --num-items 40
    millrace eval matrix --device cuda --num-items 40

1. The FP8 variant of the BF16 checkpoint is exported to a temporary folder.
2. Each row is evaluated greedily, one after the other. The first row is the reference: transformers, or on a GPU our
   own engine in FP32 on the CPU, which is faster and gives the same answers.
3. FP8 rows of a GPU have a reference of their own: our engine on the CPU with FP8 weights and activations, which is
   what the kernels are to compute. What that row loses against FP32 is the cost of FP8: it is shown, and no check.
4. Each other row is compared with its reference: no accuracy more than one standard error lower, and where the weights
   are the same and so is the precision, every answer the same, token by token.
5. Perplexity: of both checkpoints with our model, and of the BF16 one with the reference.

Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace_cli.cluster import TINY
from millrace_cli.errors import CommandError
from rich.console import Console
from rich.table import Table

from millrace_bench.checkpoint.export_fp8 import export
from millrace_bench.common import Record, print_record
from millrace_bench.eval.backend import Perplexity
from millrace_bench.eval.report import comparison_table, differences_table, evaluation_table, make_console, make_table
from millrace_bench.eval.run import Jobs, Suite, measure
from millrace_bench.eval.score import Comparison, Evaluation
from millrace_bench.eval.system import Kind, System
from millrace_bench.tasks import TASKS

DRAFTS = ("limits.draft_tokens=3",)
GPU_PART = 0.3  # for each of two workers, and for an engine of this process


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    system: System
    against: str = ""  # name of the row that is its reference; empty: the first
    accurate: bool = True  # as right as the reference
    exact: bool = True  # the reference's weights and precision: its answers too
    cached: bool = False  # prompts are in the prefix cache when they are counted


@dataclass(frozen=True, slots=True)
class Check:
    row: str
    what: str
    passed: bool
    detail: str


def rows(bf16: str, fp8: str, chunk: int, device: str) -> list[Row]:
    """On a GPU answers may differ from a CPU's: BF16's rounding turns almost even choices."""
    if device == "cuda":
        part = (f"memory_fraction={GPU_PART}",)
        on_gpu = ("device=cuda", *part)
        return [
            Row("CPU FP32", System(Kind.MODEL, bf16)),
            Row("CPU FP8", System(Kind.MODEL, fp8, keep_fp8=True), accurate=False, exact=False),
            Row("engine BF16", System(Kind.MODEL, bf16, device, part), exact=False),
            Row("engine FP8", System(Kind.MODEL, fp8, device, part), "CPU FP8", exact=False),
            Row("P → D BF16", System(Kind.PAIR, bf16, worker_set=on_gpu), exact=False),
            Row("P → D FP8", System(Kind.PAIR, fp8, worker_set=on_gpu), "CPU FP8", exact=False),
            Row("P → D BF16 with drafts", System(Kind.PAIR, bf16, worker_set=(*on_gpu, *DRAFTS)), exact=False),
        ]
    return [
        Row("transformers", System(Kind.TRANSFORMERS, bf16)),
        Row("unified BF16", System(Kind.UNIFIED, bf16)),
        Row("P → D BF16", System(Kind.PAIR, bf16)),
        Row("P → D FP8", System(Kind.PAIR, fp8), exact=False),
        Row(f"P → D chunks of {chunk}", System(Kind.PAIR, bf16, worker_set=(f"limits.max_prefill_tokens={chunk}",))),
        Row("P → D cached prefixes", System(Kind.PAIR, bf16), cached=True),
        Row("P → D with drafts", System(Kind.PAIR, bf16, worker_set=DRAFTS)),
    ]


def checks(row: Row, evaluation: Evaluation, comparison: Comparison) -> list[Check]:
    """What must hold of a row against its reference."""
    failed = evaluation.failures.total()
    found = [Check(row.name, "no request failed", not failed, str(failed))]
    if row.accurate:
        lower = [line.name for line in comparison.lines if line.a - line.b > line.standard_error]
        found.append(Check(row.name, "no accuracy more than one standard error lower", not lower, ", ".join(lower)))
    if row.exact:
        count = len(comparison.differences)
        found.append(Check(row.name, "answers identical", not count, f"{count} differ"))
    if row.cached:
        cached = evaluation.whole.tokens(lambda answer: answer.cached_tokens)
        found.append(Check(row.name, "prompts came from the cache", cached > 0, f"{cached} tokens"))
    return found


async def run(
    bf16: str, jobs: Jobs, concurrency: int, chunk: int, device: str, console: Console
) -> tuple[dict[str, Any], bool]:
    """The record's results, and whether all checks passed."""
    with tempfile.TemporaryDirectory(prefix="millrace-eval-") as folder:
        fp8 = str(Path(folder) / "fp8")
        export(Path(bf16), Path(fp8))
        plan, evaluations = rows(bf16, fp8, chunk, device), []
        for row in plan:
            async with row.system.open(concurrency) as backend:
                warm = concurrency if row.cached else 0  # so few that the cache holds them all
                evaluations.append(await measure(row.name, backend, jobs, console, warm))
            console.print(evaluation_table(evaluations[-1]))
        perplexities = {row.name: one.perplexity for row, one in zip(plan, evaluations, strict=True)}
        # On a GPU engines of this process are rows.
        own = () if device == "cuda" else (("Millrace, BF16", bf16), ("Millrace, FP8", fp8))
        for name, checkpoint in own:
            async with System(Kind.MODEL, checkpoint).open(1) as backend:
                perplexities[name] = await backend.perplexity()
    named = {one.system: one for one in evaluations}
    comparisons = [Comparison.of(named[row.against or plan[0].name], named[row.name]) for row in plan[1:]]
    found = [check for item in zip(plan[1:], evaluations[1:], comparisons, strict=True) for check in checks(*item)]
    _show(evaluations, comparisons, perplexities, found, console)
    results: dict[str, Any] = {
        "rows": [evaluation.as_dict() for evaluation in evaluations],
        "against_reference": [comparison.as_dict() for comparison in comparisons],
        "perplexity": {name: one and asdict(one) for name, one in perplexities.items()},
        "checks": [asdict(check) for check in found],
    }
    return results, all(check.passed for check in found)


def _show(
    evaluations: Sequence[Evaluation],
    comparisons: Sequence[Comparison],
    perplexities: dict[str, Perplexity | None],
    found: Sequence[Check],
    console: Console,
) -> None:
    for comparison in comparisons:
        if comparison.differences:
            console.print(comparison_table(comparison), differences_table(comparison))
    console.print(summary_table(evaluations, comparisons))
    for name, one in perplexities.items():
        if one is not None:
            console.print(f"perplexity {name}: {one.value:.4f}, {one.bits_per_byte:.4f} bits per byte")
    for check in found:
        mark = "ok    " if check.passed else "FAILED"
        console.print(f"{mark} {check.row}: {check.what} {'' if check.passed else check.detail}")


def summary_table(evaluations: Sequence[Evaluation], comparisons: Sequence[Comparison]) -> Table:
    """One line a row, the accuracy of every task, and how many answers are the reference's, named if not the first."""
    names = [task.name for task in evaluations[0].tasks]
    table = make_table("accuracy", "", *names, "all", "same answers", "cached", "output/s")
    same = ["-"]
    for one in comparisons:
        whose = "" if one.a == evaluations[0].system else f" {one.a}"
        same.append(f"{one.lines[-1].same}/{one.lines[-1].items}{whose}")
    for evaluation, count in zip(evaluations, same, strict=True):
        whole = evaluation.whole
        accuracies = [f"{task.accuracy:.3f}" for task in (*evaluation.tasks, whole)]
        cached = str(whole.tokens(lambda answer: answer.cached_tokens))
        table.add_row(evaluation.system, *accuracies, count, cached, f"{whole.output_rate:.1f}")
    return table


def main(argv: Sequence[str]) -> int:
    """The exit code. CommandError for what cannot be run."""
    parser = argparse.ArgumentParser(
        prog="millrace eval matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", metavar="DIR", default=str(TINY), help="in BF16 (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num-items", type=int, default=40, help="of each task (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="items under way at once (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of all rows but the references")
    parser.add_argument("--max-prefill-tokens", type=int, default=256, help="of the chunked row (%(default)s)")
    arguments = parser.parse_args(argv)
    for name in ("num_items", "concurrency", "max_prefill_tokens"):
        if getattr(arguments, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}", code=2)
    checkpoint = System(Kind.MODEL, arguments.checkpoint).where
    concurrency, chunk = arguments.concurrency, arguments.max_prefill_tokens
    suite = Suite(tuple(arguments.tasks), arguments.num_items)
    try:
        results, passed = asyncio.run(
            run(checkpoint, suite.jobs(), concurrency, chunk, arguments.device, make_console())
        )
    except (ValueError, OSError) as error:  # of the items, or of the export
        raise CommandError(str(error)) from error
    config = asdict(suite) | {"checkpoint": checkpoint, "concurrency": concurrency, "max_prefill_tokens": chunk}
    config |= {"device": arguments.device}
    print_record(Record("eval matrix", config, results))
    return int(not passed)
