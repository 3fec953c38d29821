"""Writes the measured figures of the documents from the JSON of the runs.

make figures        writes them, and lists runs that are no evidence (provenance.py); tests/bench/test_figures.py fails
                    while a document and its JSON differ

A document names what it wants between two marks, and Markdown is put there:

    <!-- figures: drafts -->
    | rank of the 671B model | …
    <!-- end of figures -->

The functions of figures_*.py make the Markdown. They take figures from bench/results with `row` (figures_source.py), so
a number that no run has cannot get into a table. The tables of docs/api.md come from the types that read requests
(api_fields.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from millrace_bench import (
    api_fields,
    figures_docs,
    figures_gpus,
    figures_plan,
    figures_readme,
    figures_seeds,
    provenance,
)
from millrace_bench.common import ROOT
from millrace_bench.figures_source import RESULTS, Blocks

ALL = (
    figures_readme.BLOCKS
    | figures_docs.BLOCKS
    | figures_gpus.BLOCKS
    | figures_seeds.BLOCKS
    | figures_plan.BLOCKS
    | api_fields.BLOCKS
)
BLOCK = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)


def render(document: Path, blocks: Blocks) -> str:
    """The text of a document with its figures made anew. Raises KeyError for a name that no block has."""
    up = "../" * len(document.relative_to(ROOT).parent.parts)

    def fill(match: re.Match[str]) -> str:
        text = blocks[match[2]]().replace(f"]({RESULTS}", f"]({up}{RESULTS}")
        return f"{match[1]}{text}{match[4]}"

    return BLOCK.sub(fill, document.read_text())


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    for document in documents():
        text = render(document, ALL)
        if text != document.read_text():
            document.write_text(text)
            print(f"wrote {document.relative_to(ROOT)}")
    for name, reasons in provenance.stale(documents()).items():
        print(f"stale: {name}.json: {'; '.join(reasons)}")


if __name__ == "__main__":
    main()
