"""Tables of evaluations."""

import shutil
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millrace_bench.eval.score import Comparison, Evaluation, Judged, Line, TaskResult
from millrace_bench.tasks import Verdict

MIN_WIDTH = 150
SHOWN_DIFFERENCES = 20
SHOWN_CHARACTERS = 60


def make_console() -> Console:
    """On stderr, and wide enough for our tables where that is no terminal."""
    return Console(stderr=True, highlight=False, width=max(shutil.get_terminal_size().columns, MIN_WIDTH))


def make_table(title: str, first: str, *numbers: str) -> Table:
    """One column to the left, the others to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def evaluation_table(evaluation: Evaluation) -> Table:
    counts = ("invalid", "failed", "prompt tokens", "cached", "output tokens", "output/s")
    table = make_table(evaluation.system, "task", "items", "accuracy", "95 % interval", *counts)
    for task in evaluation.tasks:
        table.add_row(*_cells(task))
    table.add_section()
    table.add_row(*_cells(evaluation.whole))
    return table


def _cells(task: TaskResult) -> Iterable[str]:
    figures = task.as_dict()
    yield task.name
    yield str(task.items)
    yield f"{task.accuracy:.3f}"
    yield f"{figures['low']:.3f} - {figures['high']:.3f}"
    yield from (str(figures[name]) for name in ("invalid", "failed", "prompt_tokens", "cached_tokens", "output_tokens"))
    yield f"{task.output_rate:.1f}"


def perplexity_line(evaluation: Evaluation) -> str:
    found = evaluation.perplexity
    if found is None:
        return "perplexity: not measured, since the API does not score prompts; use --model"
    return f"perplexity {found.value:.3f} over {found.tokens} tokens, {found.bits_per_byte:.3f} bits per byte"


def comparison_table(comparison: Comparison) -> Table:
    numbers = ("items", "same answer", "accuracy A", "accuracy B", "B - A", "standard error", "agree")
    table = make_table(f"A = {comparison.a}\nB = {comparison.b}", "task", *numbers)
    for line in comparison.lines:
        if line is comparison.lines[-1]:
            table.add_section()
        table.add_row(*_line_cells(line))
    return table


def _line_cells(line: Line) -> Iterable[str]:
    yield line.name
    yield str(line.items)
    yield str(line.same)
    yield from (f"{value:.3f}" for value in (line.a, line.b))
    yield f"{line.b - line.a:+.3f}"
    yield f"{line.standard_error:.3f}"
    yield "yes" if line.agree else "[bold red]no[/]"


def differences_table(comparison: Comparison) -> Table:
    """The first of them; the JSON line has all."""
    shown = comparison.differences[:SHOWN_DIFFERENCES]
    title = f"{len(shown)} of {len(comparison.differences)} differing items"
    table = Table("item", "expected", "A", "B", title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for one in shown:
        table.add_row(one.item, _short(one.expected), _judged(one.a), _judged(one.b))
    return table


def _judged(one: Judged) -> Text:
    text = _short(one.answer.error or one.answer.text)
    text.stylize("green" if one.verdict is Verdict.CORRECT else "red")
    return text


def _short(text: str) -> Text:
    shown = repr(text)[1:-1]
    return Text(shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + "…")
