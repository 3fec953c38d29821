"""The figures in the documents are those of the committed JSON."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from millrace_bench import figures, provenance
from millrace_bench.figures import BLOCK, RESULTS, ROOT, TEMPLATES, documents, environment, last_column, render, row


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_has_the_figures_of_its_json(document: Path) -> None:
    assert render(document, environment()) == document.read_text(), "run `make figures`"


def test_every_template_is_in_one_document() -> None:
    shared = {"eval", "pd", "stages"}  # others include them
    named = Counter(match[2] for document in documents() for match in BLOCK.finditer(document.read_text()))
    assert named == Counter(file.stem for file in TEMPLATES.iterdir() if file.stem not in shared)


def test_marks_come_in_pairs() -> None:
    """A mark with a spelling mistake would leave its figures as they are."""
    for document in documents():
        text = document.read_text()
        assert len(re.findall(r"<!-- +(?:end of )?figures", text)) == 2 * len(list(BLOCK.finditer(text))), document


def test_no_result_of_the_readme_is_typed() -> None:
    text = BLOCK.sub("", (ROOT / "README.md").read_text())
    section = text.partition("## Results")[2].partition("\n## ")[0]
    assert section and not re.findall(r"^\|.*", section, re.MULTILINE)


# Measured beside changes that were not committed, and not measured again yet.
BEFORE_A_COMMIT = {
    "cpu/router-tls", "cpu/router-tls-sim",
    "h200/drafts-tp8", "h200/eval-drafts", "h200/ranks-overlap", "h200/ranks-third", "h200/tiers",
}  # fmt: skip


def test_results_of_changes_that_were_not_committed_are_named() -> None:
    files = (ROOT / RESULTS).rglob("*.json")
    found = {f"{file.parent.name}/{file.stem}" for file in files if '-dirty"' in file.read_text()}
    assert found == BEFORE_A_COMMIT


@pytest.mark.parametrize("file", sorted((ROOT / RESULTS).rglob("*.json")), ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(file: Path) -> None:
    """Since records have it. Earlier ones lack the commit, clocks and power; three were made by hand."""
    text = file.read_text()
    record = json.loads(text)
    assert str(ROOT) not in text, "a folder of one machine"
    if record.get("time", "") < "2026-11-23T01:40":
        return
    assert re.match("[0-9a-f]{7}", record["versions"]["commit"]) and record["command"] and record["hardware"]
    if " x " in record["hardware"]:  # GPUs
        assert record["gpus"] and all(gpu["sm_mhz"] and gpu["power_w"] for gpu in record["gpus"])


SINCE, MOST_STALE = "2026-11-27T12:00", 76  # runs of before; the number may only fall


def test_a_run_that_a_document_names_is_evidence() -> None:
    """A clean commit, a command, the locked versions. `make figures` lists those that lack one."""
    found = provenance.stale(documents())
    new = {name: reasons for name, reasons in found.items() if provenance.record(name).get("time", "") >= SINCE}
    assert new == {} and len(found) <= MOST_STALE, new or len(found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"versions": {}}, "no commit"),
        ({"versions": {"commit": "1234567-dirty"}}, "changes that were not committed"),
        ({"command": ""}, "no command"),
        ({"command": "ad hoc: a script"}, "no command"),
        ({"versions": {"commit": "1234567", "torch": "2.12.0"}}, "torch 2.12.0, not 2.11.0"),
        ({"versions": {"commit": "1234567", "torch": "2.12.0"}, "hardware": "2 cores"}, ""),
    ],
)
def test_what_a_record_lacks_is_named(change: dict[str, object], reason: str) -> None:
    good = {"versions": {"commit": "1234567", "torch": "2.11.0+cu130"}, "command": "a", "hardware": "1 x NVIDIA H200"}
    assert "; ".join(provenance.faults({**good, **change}, {"torch": "2.11.0"})) == reason


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one run, one template and one document."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "bench/results/h200").mkdir(parents=True)
    rows = [{"kind": "decode", "ms": 4.25}, {"kind": "decode", "ms": 5.0, "batch": 2}]
    (tmp_path / "bench/results/h200/figures-test.json").write_text(json.dumps({"results": {"rows": rows}}))
    run = "'h200/figures-test'"
    line = f"| {{{{ row({run}, batch=2).ms | f('.1f') }}}} ms | {{{{ '' }}}} | {{{{ source({run}) }}}} |"
    (tmp_path / "step.jinja").write_text(f"| step | | JSON |\n|---|---|---|\n{line}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("a\n<!-- figures: step -->\n| step |\n<!-- end of figures -->\nb\n")
    return tmp_path


def test_a_block_is_made_anew(tree: Path) -> None:
    link = "[figures-test](../bench/results/h200/figures-test.json)"
    mark = "<!-- figures: step -->\n| step | | JSON |\n|---|---|---|"
    text = render(tree / "docs/a.md", environment(tree))
    assert text == f"a\n{mark}\n| 5.0 ms | | {link} |\n<!-- end of figures -->\nb\n"


def test_a_figure_is_of_exactly_one_row(tree: Path) -> None:
    with pytest.raises(LookupError, match=r"0 rows of h200/figures-test.json have {'kind': 'prefill'}"):
        row("h200/figures-test", kind="prefill")
    with pytest.raises(LookupError, match="2 rows"):
        row("h200/figures-test", kind="decode")


def test_hand_written_columns_stay() -> None:
    table = "| row | what | figure |\n|---|---|---|\n| A1 | a | old |\n| A2 | b | not measured |\n"
    assert last_column(table, "A1: 1: 2\n") == table.replace("old", "1: 2")
