"""Writes the measured figures of the documents from the JSON of the runs.

make figures        writes them, and lists runs that are no evidence (provenance.py); tests/bench/test_figures.py fails
                    while a document and its JSON differ

A document names what it wants between two marks, and the template of that name, bench/figures/NAME.jinja, is put there:

    <!-- figures: drafts -->
    | rank of the 671B model | …
    <!-- end of figures -->

A template is Markdown. It takes figures from bench/results with `row`, so a number that no run has cannot get into a
table. The tables of docs/reference/api-*.md come from the types that read requests (api_fields.py).
"""

import functools
import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from millrace_common.step_times import chunk_pairs
from millrace_load.record import ROOT, Row
from millrace_serve.plan import predict

from millrace_bench import provenance, scaling
from millrace_bench.api_fields import api_fields

RESULTS = "bench/results"
TEMPLATES = ROOT / "bench" / "figures"
BLOCK = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)


@functools.cache
def results(name: str) -> dict[str, Any]:
    """Of a run: "h200/engine-tp8"."""
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text())["results"]
    return found


def rows(name: str, kind: str = "rows", /, **where: Any) -> list[Row]:
    """The rows of a run that have these values. `kind`: of a run that has several lists of them."""
    return [one for one in results(name)[kind] if where.items() <= one.items()]


def row(name: str, kind: str = "rows", /, **where: Any) -> Row:
    """The one row of a run that has these values. LookupError: there is none, or more than one."""
    found = rows(name, kind, **where)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name}.json have {where}")
    return found[0]


def of_runs(names: Iterable[str], kind: str = "rows", /, **where: Any) -> list[Row]:
    return [one for name in names for one in rows(name, kind, **where)]


def by(key: str, found: Iterable[Row]) -> dict[Any, Row]:
    """The last row of each value of `key`."""
    return {one[key]: one for one in found}


def source(*names: str) -> str:
    """Links to the JSON of runs, relative to the top folder."""
    return ", ".join(f"[{name.partition('/')[2]}]({RESULTS}/{name}.json)" for name in names)


def short(time: float) -> str:
    """Three digits, or all before the point."""
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"


def computed(gpus: int) -> dict[str, scaling.Step]:
    """Steps on so many GPUs by name, as scaling.py predicts them from runs on two."""
    steps = scaling.steps(scaling.Fit.of(results("h200/exchange")["rows"]), results("h200/ranks")["rows"])
    return {step.name: step for step in steps if step.gpus == gpus}


def predicted_ms(kind: str, ranks: tuple[str, str, int, int], *sizes: int) -> float | None:
    """Of a step, or of a token of a prompt, as `millrace plan` predicts it; None: it does not. ranks: of StepRanks."""
    found = getattr(predict, kind)(predict.StepRanks(*ranks), *sizes)
    return found and float(found.ms)


def fail(why: str) -> NoReturn:
    raise ValueError(why)


def environment(templates: Path = TEMPLATES) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    figures = (results, rows, row, of_runs, by, source, short, computed, predicted_ms, fail, api_fields, chunk_pairs)
    made.globals |= {function.__name__: function for function in (*figures, min, max, dict)} | {
        "median": statistics.median,
        "nan": math.nan,
    }
    made.filters |= {
        "f": format,
        "apply": lambda value, function: function(value),
        "pick": lambda one, *keys: tuple(one[key] for key in keys),
    }
    made.tests["contains"] = lambda text, part: part in text
    return made


def said(stage: str, found: dict[str, Any]) -> str:
    """What the tables of `millrace bench gpu` and `node` say of results. jinja2.UndefinedError: something lacks."""
    return str(getattr(environment().get_template("stages.jinja").module, stage)(found))


def render(document: Path, templates: jinja2.Environment) -> str:
    """The text of a document with its figures made anew. jinja2.TemplateNotFound: of a name without a template."""
    up = "../" * len(document.relative_to(ROOT).parent.parts)

    def fill(match: re.Match[str]) -> str:
        begin, name, old, end = match.groups()
        text = templates.get_template(f"{name}.jinja").render()
        text = re.sub(r"\|  +(?=\|)", "| ", text)  # an empty cell
        text = last_column(old, text) if name == "seeds" else text
        return f"{begin}{text.replace(f']({RESULTS}', f']({up}{RESULTS}')}{end}"

    return BLOCK.sub(fill, document.read_text())


def last_column(table: str, figures: str) -> str:
    """A table whose other columns are written by hand. `figures` has lines "ROW: TEXT"; other rows stay as they are."""
    texts: dict[str, str] = dict(line.split(": ", 1) for line in figures.splitlines())
    lines = []
    for line in table.splitlines():
        figure = texts.get(line.strip("|").partition("|")[0].strip())
        lines.append(f"{line.rsplit('|', 2)[0]}| {figure} |" if figure else line)
    return "".join(f"{line}\n" for line in lines)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    templates = environment()
    for document in documents():
        text = render(document, templates)
        if text != document.read_text():
            document.write_text(text)
            print(f"wrote {document.relative_to(ROOT)}")
    for name, reasons in provenance.stale(documents()).items():
        print(f"stale: {name}.json: {'; '.join(reasons)}")


if __name__ == "__main__":
    main()
