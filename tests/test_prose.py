"""The linter of prose finds what CONTRIBUTING.md forbids, and nothing in code or in tables that are made."""

from pathlib import Path

import pytest
from millrace_testing import prose

LONG = " ".join(["word"] * 26) + "."


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(prose, "ROOT", tmp_path)

    def faults(text: str, name: str = "page.md") -> list[str]:
        (tmp_path / name).write_text(text)
        return [fault.what.partition(":")[0] for fault in prose.faults(tmp_path / name)]

    return faults


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"# A\n\n{LONG}\n", "the sentence has 26 words"),
        (f"- {LONG}\n- b\n", "the sentence has 26 words"),
        (f"| a | {LONG} |\n", "the sentence has 26 words"),
        ("| a | " + "Two words. " * 23 + "|\n", "the table cell has 46 words"),
        ("A captain agrees.\n", "'captain' is a private word"),
        ("The lender's [drafts](a.md).\n", "'lender' is a private word"),
        ("a" * 60 + " " + "b" * 60 + "\n", "the line has 121 columns, more than 120"),
        ("a\n\n" * 126, "the page has 252 lines, more than 250"),
    ],
)
def test_a_fault_is_found(lint, text: str, found: str) -> None:
    assert found in lint(text)


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{LONG} node leader\n```\n",
        f"<!-- figures: a -->\n| {LONG} |\n<!-- end of figures -->\n",
        "The setting `limits.draft_batches` and a draft token.\n",
        "Read *Routers: Drafts accepted by pair*.\n",
        "One. Two `" + "x " * 30 + "`. Three.\n",
        "    " + "a + " * 26 + "b\n",
    ],
)
def test_code_and_tables_that_are_made_are_left_out(lint, text: str) -> None:
    assert lint(text) == []


def test_the_readme_is_shorter(lint) -> None:
    assert lint("a\n" * 151, "README.md") == ["the sentence has 151 words", "the page has 151 lines, more than 150"]
