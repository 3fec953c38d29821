"""docs/reference says what the code says, and each error says what to do, and messages have plain words."""

import ast
from pathlib import Path

import pytest
from millrace_common.reasons import Reason
from millrace_rpc.errors import TABLE
from millrace_testing import prose
from millrace_testing.paths import ROOT
from millrace_testing.reference_pages import ACTIONS, BLOCK, BLOCKS, pages, render

VERBS = {"Ask", "Check", "Correct", "Raise", "Read", "Report", "Retry", "Send", "Set", "Shorten", "Use", "Wait"}
LOGS = {"info", "warning", "error", "exception", "counter", "gauge", "histogram"}
SPEAK = {"Option", "Argument", "add_argument", "FieldError", "MillraceError", "Failure", "invalid", *LOGS}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_page_has_what_the_code_has(page: Path) -> None:
    assert render(page) == page.read_text(), "run `make reference`"


def test_every_table_is_on_one_page() -> None:
    assert sorted(name for page in pages() for _, name, *_ in BLOCK.findall(page.read_text())) == sorted(BLOCKS)


def test_every_reason_has_a_cause_and_an_action() -> None:
    assert ACTIONS.keys() == TABLE.keys() == set(Reason)
    assert all(cause for cause, _ in ACTIONS.values())


@pytest.mark.parametrize("reason", Reason)
def test_an_error_says_what_to_do(reason: Reason) -> None:
    """It begins with an imperative. An error that the router retries tells a client to try again, or how to look."""
    first = ACTIONS[reason][1].split()[0].strip(".:,")
    assert first in VERBS
    if TABLE[reason].retry_after_s:
        assert first in {"Raise", "Read", "Retry", "Wait"}


@pytest.mark.parametrize("folder", ["proto", "kernels", "services", "router", "bench", "helm"])
def test_errors_logs_metrics_and_options_have_no_private_word(folder: str) -> None:
    """As the documents. JSON Schema has drafts of its own."""
    texts = []
    for path in set((ROOT / folder).rglob("*.py")) - set(ROOT.glob("proto/millrace_common/grammar/*")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Raise) or getattr(name, "attr", getattr(name, "id", "")) in SPEAK:
                texts += [
                    it.value for it in ast.walk(node) if isinstance(it, ast.Constant) and isinstance(it.value, str)
                ]
    assert [text for text in texts if text[:2] != "--" and prose.WORD.search(prose.CODE.sub("", text))] == []
