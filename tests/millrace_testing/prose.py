"""The linter of the documents' prose: `python -m millrace_testing.prose`, a part of `make lint`.

It reads paragraphs, list items and table cells. Code, headings, and tables that are made from figures are left out.
CONTRIBUTING.md has the rules in words.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace_testing.paths import ROOT

MAX_WORDS, MAX_CELL, MAX_COLUMNS, MAX_LINES = 25, 45, 120, 250
SHORTER = {"README.md": 150}
LONGER = {"CHANGELOG.md": 10_000}  # grows with each release
# Private word → the field's. A word between backticks is a name in the code, and may stay.
PRIVATE = {
    r"attempt number": "number of the try",
    r"legs?": "prefill or decode sub-request",
    r"the way back": "remote prefix fetch",
    r"loans?|lends?|lent|lenders?|borrow(?:s|ed|er|ing)?": "remote prefix fetch, source",
    r"parked": "held for transfer",
    r"fences?": "release handshake",
    r"captains?": "node leader",
    r"bells?": "wake-up pipe",
    r"pulses?": "heartbeat",
    r"withheld": "not ready, draining",
    r"shunned": "ejected",
    r"late launch(?:es)?": "delayed launch",
    r"sink page": "null page",
    r"rehearsals?|rehearse[sd]?": "profiling run",
    r"drafts|draft(?! tokens?| model|s? 2020)": "draft token",
    r"shared prompts?": "context-parallel prefill",
    r"balanced experts": "expert load balancing",
    r"doubts|wedged?": "broken transport",
    r"credits?": "capacity",
    r"thoughts": "reasoning",
    r"so many|of these|what \w+ does": "name the thing",
    r"way to serve|ways?: `": "route",
}
WORD = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)
SKIPPED = re.compile(r"^```.*?^```|<!-- figures: .*?<!-- end of .*?-->|<!--.*?-->", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
END = re.compile(r"(?<=[.!?])[)\"*”]*\s+")
CODE, LINK = re.compile(r"`[^`]*`"), re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
PANEL = re.compile(r"\*[A-Z][\w ]+: [^*]+\*")  # of a dashboard, by its name


@dataclass(frozen=True)
class Fault:
    line: int
    what: str


def documents() -> list[Path]:
    """Those that people read. The log is history: its entries stay as they were written."""
    pages = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "log" not in path.relative_to(ROOT).parts]
    return [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")), *pages]


def faults(document: Path) -> list[Fault]:
    name, text = str(document.relative_to(ROOT)), document.read_text()
    return sorted([*_shape(name, text), *_sentences(text)], key=lambda fault: fault.line)


def _shape(name: str, text: str) -> Iterator[Fault]:
    lines = text.splitlines()
    most = SHORTER.get(name, LONGER.get(name, MAX_LINES))
    if len(lines) > most:
        yield Fault(most, f"the page has {len(lines)} lines, more than {most}")
    for number, line in enumerate(_blanked(text).splitlines(), 1):
        breakable = CODE.sub("", re.sub(r"\]\([^)]*\)", "", LINK.sub("", line)))  # what a line break can shorten
        if len(breakable) > MAX_COLUMNS and not line.startswith("|"):
            yield Fault(number, f"the line has {len(line)} columns, more than {MAX_COLUMNS}")


def _sentences(text: str) -> Iterator[Fault]:
    lines = ["", *text.splitlines()]
    for number, block in blocks(_blanked(text)):
        if lines[number].startswith("|") and (count := len(_plain(block).split())) > MAX_CELL:
            yield Fault(number, f"the table cell has {count} words: a list below the table reads better")
        for word in WORD.findall(CODE.sub("", PANEL.sub("", LINK.sub(r"\1", block)))):
            better = next(good for bad, good in PRIVATE.items() if re.fullmatch(bad, word, re.IGNORECASE))
            yield Fault(number, f"{word!r} is a private word: {better}")
        for sentence in sentences(block):
            if (count := len(sentence.split())) > MAX_WORDS:
                yield Fault(number, f"the sentence has {count} words: {sentence}")


def _blanked(text: str) -> str:
    """The text without code and tables that are made, with as many lines."""
    return SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each paragraph, list item and table cell."""
    block: list[str] = []
    first = 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.strip()
        table, heading = line.startswith("|"), line.startswith(("#", "<", "!["))
        if block and (not line or table or heading or ITEM.match(line)):
            yield first, " ".join(block)
            block = []
        if table:
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line) if cell.strip())
        elif line and not heading and not raw.startswith("    "):  # a formula
            first = first if block else number
            block.append(ITEM.sub("", line))


def sentences(block: str) -> list[str]:
    """A span of code is one word, a link is its text."""
    return [sentence for sentence in END.split(_plain(block)) if sentence.strip()]


def _plain(block: str) -> str:
    return CODE.sub("code", LINK.sub(r"\1", block)).replace("e.g. ", "").replace("i.e. ", "")


def main() -> None:
    found = [(document.relative_to(ROOT), fault) for document in documents() for fault in faults(document)]
    for name, fault in found:
        print(f"{name}:{fault.line}: {fault.what}", file=sys.stderr)  # noqa: T201
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
