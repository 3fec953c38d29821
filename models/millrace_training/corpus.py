"""Plain text from the documentation that Debian packages ship.

    python -m millrace_training.corpus DIR_OF_UNPACKED_PACKAGES OUT_DIR    ->    OUT_DIR/{train,heldout}.jsonl

1. Each HTML page of SOURCES becomes one document: its headings, paragraphs and list items, no code, tables, navigation.
2. A paragraph that occurred before, on any page, is dropped: boilerplate would be learned by heart.
3. Pages whose path hashes into one part of fifty are held out.
"""

import argparse
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# Debian package -> where its English pages are. Licences: see README.md.
SOURCES = {
    "apache2-doc": "usr/share/doc/apache2-doc/manual/en/**/*.html*",
    "aptitude-doc-en": "usr/share/doc/aptitude/html/en/**/*.html*",
    "bind9-doc": "usr/share/doc/bind9-doc/arm/*.html*",
    "cmake-doc": "usr/share/doc/cmake-data/html/**/*.html*",
    "debian-faq": "usr/share/doc/debian/FAQ/*.en.html*",
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US/*.html*",
    "debian-policy": "usr/share/doc/debian-policy/*.html/*.html*",
    "debian-reference-en": "usr/share/debian-reference/*.en.html*",
    "git-doc": "usr/share/doc/git-doc/**/*.html*",
    "installation-guide-amd64": "usr/share/doc/installation-guide-amd64/en/*.html*",
    "libreoffice-help-en-us": "usr/share/libreoffice/help/en-US/text/**/*.html*",
    "maint-guide": "usr/share/doc/maint-guide/html/*.en.html*",
    "octave-doc": "usr/share/doc/octave/octave.html/*.html*",
    "postfix-doc": "usr/share/doc/postfix/html/*.html*",
    "postgresql-doc-15": "usr/share/doc/postgresql-doc-15/html/*.html*",
    "python-django-doc": "usr/share/doc/python-django-doc/html/**/*.html*",
    "python-flask-doc": "usr/share/doc/python-flask-doc/html/**/*.html*",
    "python-sqlalchemy-doc": "usr/share/doc/python-sqlalchemy-doc/html/**/*.html*",
    "python3.11-doc": "usr/share/doc/python3.11/html/**/*.html*",
    "r-doc-html": "usr/share/doc/r-doc-html/manual/*.html*",
    "rust-doc": "usr/share/doc/rust-doc/html/[bre]*/*.html*",
    "sqlite3-doc": "usr/share/doc/sqlite3/**/[!r]*.html*",
    "zsh-doc": "usr/share/doc/zsh-common/html/*.html*",
}
BLOCKS = {"p", "li", "dd", "dt", "h1", "h2", "h3", "h4"}
SKIPPED = {"pre", "table", "script", "style", "nav", "head", "form", "footer", "svg"}
MIN_CHARS = 40  # of a paragraph that is no heading
MIN_DOCUMENT_CHARS = 400
HELD_OUT_PART = 50
PUNCTUATION = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " ", "¶": ""}
)


class _Blocks(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []  # (tag, text)
        self._tag, self._text, self._skipping = "p", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in SKIPPED:
            self._end_block()
            self._skipping += 1
        elif tag in BLOCKS:
            self._end_block()
            self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in SKIPPED:
            self._skipping = max(0, self._skipping - 1)
        elif tag in BLOCKS:
            self._end_block()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._text += data

    def _end_block(self) -> None:
        text = " ".join(self._text.translate(PUNCTUATION).split())
        if text:
            self.blocks.append((self._tag, text))
        self._text = ""


def documents(root: Path) -> Iterator[tuple[str, str]]:
    """(path below root, text) of every page with enough text, in a fixed order."""
    seen: set[bytes] = set()
    for pattern in SOURCES.values():
        for path in sorted(root.glob(pattern)):
            if not path.is_file():
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = _prose(raw.decode("utf-8", errors="ignore"), seen)
            if len(text) >= MIN_DOCUMENT_CHARS:
                yield str(path.relative_to(root)), text


def _prose(html: str, seen: set[bytes]) -> str:
    parser = _Blocks()
    parser.feed(html)
    parser.close()
    kept: list[str] = []
    heading = ""  # kept only when a paragraph follows
    for tag, text in parser.blocks:
        if not _is_english(text):
            continue
        if tag.startswith("h"):
            heading = re.sub(r"^(Chapter )?[\dA-Z.]*\d\.?\s*", "", text)
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or len(text) < MIN_CHARS or text[-1] not in ".:!?)":
            continue
        seen.add(digest)
        kept += [heading, text] if heading else [text]
        heading = ""
    return "\n\n".join(kept)


def _is_english(text: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in text)
    return text.isascii() and letters > 0.8 * len(text)


def is_held_out(path: str) -> bool:
    return hashlib.sha256(path.encode()).digest()[0] % HELD_OUT_PART == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect plain text from unpacked Debian packages.")
    parser.add_argument("root", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "train.jsonl").open("w") as train, (args.out / "heldout.jsonl").open("w") as heldout:
        for path, text in documents(args.root):
            (heldout if is_held_out(path) else train).write(json.dumps({"path": path, "text": text}) + "\n")


if __name__ == "__main__":
    main()
