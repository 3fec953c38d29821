"""Every way to serve a checkpoint, on the same items, against transformers or, on a GPU, our engine on the CPU.

    millrace eval matrix --checkpoint models/tiny --num-items 40
    millrace eval matrix --device cuda --num-items 40

1. The quantised variants of the BF16 checkpoint that rows need are exported to a temporary folder.
2. Each row is evaluated greedily, one after the other. The first row is the reference: transformers, or on a GPU our
   own engine in FP32 on the CPU, which is faster and gives the same answers.
3. Quantised rows of a GPU have references of their own: our engine on the CPU with FP8 or INT8 weights and activations,
   which is what the kernels are to compute. What such a row loses against FP32 is the cost of its form: it is shown,
   and no check.
4. Each other row is compared with its reference: no accuracy more than one standard error lower, and where the weights
   are the same and so is the precision, every answer the same, token by token.
5. Perplexity: of the BF16 and FP8 checkpoints with our model, of rows in this process, and of the first reference.

Exit code 1 when a check fails.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from millrace_cli.cluster import TINY
from millrace_cli.errors import CommandError
from millrace_load.options import CommandLine
from millrace_load.record import Record, gpus, print_record
from millrace_serve.model.checkpoint.export_quantised import QUANTIZATIONS, export
from rich.console import Console
from rich.table import Table

from millrace_bench.data import read_data
from millrace_bench.eval.backend import Perplexity
from millrace_bench.eval.report import comparison_table, differences_table, evaluation_table, make_console, make_table
from millrace_bench.eval.run import Jobs, Suite, measure
from millrace_bench.eval.score import Comparison, Evaluation
from millrace_bench.eval.system import Kind, System
from millrace_bench.tasks import TASKS

FORMS = tuple(QUANTIZATIONS)
# Not DeepEP, which takes rows of 2,048 columns and more: the trained model's have 256 (tests/model/test_deepep.py).
TWO_GPUS = ("tp=2", "dp=2 limits.context_parallel_tokens=256", "dp=2 exchange=peer", "dp=2 exchange=gather")
GPU_PART = 0.3  # for each of two workers, and for an engine of this process


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    system: System
    weights: str = ""  # the form of them, of checkpoint.export_quantised; empty: BF16
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


def rows(bf16: str, chunk: int, device: str, ranks: Sequence[str] = ()) -> list[Row]:
    """Of the BF16 checkpoint in this folder; `run` gives the others theirs. On a GPU answers may differ from a CPU's:
    BF16's rounding turns almost even choices. `ranks`: settings of workers with several GPUs.
    """
    known = {"chunk": chunk, "forms": FORMS, "gpu_part": GPU_PART, "ranks": ranks}
    return [_row(bf16, **one) for one in read_data("matrix.yaml.jinja", **known)[device]]


def _row(bf16: str, *, name: str, kind: str = "model", **keys: Any) -> Row:
    """Of the file's keys: some are the system's."""
    of_row = {key: keys.pop(key) for key in ("weights", "against", "accurate", "exact", "cached") if key in keys}
    own, kernels = tuple(keys.pop("worker_set", ())), tuple(keys.pop("kernels", {}).items())
    return Row(name, System(Kind(kind), bf16, worker_set=own, kernels=kernels, **keys), **of_row)


def chosen(plan: list[Row], texts: Sequence[str]) -> list[Row]:
    """Rows with one of these texts in their names, and their references; all rows without texts."""
    wanted = [row for row in plan if not texts or any(text in row.name for text in texts)]
    needed = {plan[0].name, *(row.name for row in wanted), *(row.against for row in wanted)}
    return [row for row in plan if row.name in needed]


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
    bf16: str, jobs: Jobs, concurrency: int, chunk: int, device: str, texts: Sequence[str], console: Console
) -> tuple[dict[str, Any], bool]:
    """The record's results, and whether all checks passed."""
    with tempfile.TemporaryDirectory(prefix="millrace-eval-") as folder:
        two_gpus = TWO_GPUS if len(gpus()) >= 2 else ()
        plan, evaluations, where = chosen(rows(bf16, chunk, device, two_gpus), texts), [], {"": bf16}
        for form in sorted({row.weights for row in plan} - {""}):
            where[form] = str(Path(folder) / form)
            export(Path(bf16), Path(where[form]), form)
        for row in plan:
            async with replace(row.system, where=where[row.weights]).open(concurrency) as backend:
                warm = concurrency if row.cached else 0  # so few that the cache holds them all
                evaluations.append(await measure(row.name, backend, jobs, console, warm))
            console.print(evaluation_table(evaluations[-1]))
        perplexities = {row.name: one.perplexity for row, one in zip(plan, evaluations, strict=True)}
        # On a GPU engines of this process are rows.
        for form, name in () if device == "cuda" else (("", "Millrace, BF16"), ("fp8", "Millrace, FP8")):
            if form in where:
                async with System(Kind.MODEL, where[form]).open(1) as backend:
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
    parser = CommandLine("millrace eval matrix", __doc__)
    parser.add_argument("--checkpoint", metavar="DIR", default=str(TINY), help="BF16 checkpoint (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num-items", type=int, default=40, help="items of each task (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="items at the same time (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device, not of references")
    parser.add_argument("--max-prefill-tokens", type=int, default=256, help="for the chunked row (%(default)s)")
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="only rows with one of the texts")
    arguments = parser.parse_args(argv)
    checkpoint = System(Kind.MODEL, arguments.checkpoint).where
    concurrency, chunk = arguments.concurrency, arguments.max_prefill_tokens
    suite = Suite(tuple(arguments.tasks), arguments.num_items)
    try:
        results, passed = asyncio.run(
            run(checkpoint, suite.jobs(), concurrency, chunk, arguments.device, arguments.rows, make_console())
        )
    except (ValueError, OSError) as error:  # of the items, or of the export
        raise CommandError(str(error)) from error
    config = asdict(suite) | {"checkpoint": checkpoint, "concurrency": concurrency, "max_prefill_tokens": chunk}
    config |= {"device": arguments.device, "rows": arguments.rows}
    print_record(Record("eval matrix", config, results))
    return int(not passed)
