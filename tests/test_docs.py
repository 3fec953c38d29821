"""The documents say what is true: their make targets and links exist, and their commands run as they are written.

In README and the tutorial for a laptop, a fenced bash block below `<!-- run: serve -->` is started and left running.
Those below `<!-- run -->` run one after the other meanwhile. A plain block right after one of them is what it prints.
Blocks below `<!-- run: gpu -->` and `<!-- run: cluster -->` need more than this machine; tests/helm renders the latter.
"""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace_bench import config_leaves
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig
from millrace_testing import HANG_S, prose
from millrace_testing.paths import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"<!-- run(?:: (?P<kind>\w+))? -->\n```bash\n(?P<code>.*?)```\n(?:\n```\n(?P<output>.*?)```)?", re.DOTALL
)
EXECUTED = [ROOT / "README.md", ROOT / "docs" / "tutorials" / "laptop.md"]
PORTS = (50051, 50052, 8000, 8001)  # what `make serve` listens on, and so what README names


def blocks(kind: str | None) -> list[re.Match[str]]:
    found = [match for document in EXECUTED for match in BLOCK.finditer(document.read_text())]
    return [match for match in found if match["kind"] == kind]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document: Path) -> None:
    code = re.findall(r"`([^`\n]+)`|^```bash\n(.*?)```", document.read_text(), re.MULTILINE | re.DOTALL)
    named = {target for parts in code for target in re.findall(r"\bmake ([a-z][a-z-]*)", " ".join(parts))}
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_exist(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_documents_that_code_and_charts_name_exist() -> None:
    folders = [ROOT / name for name in ("proto", "router", "services", "kernels", "bench", "helm", "k8s")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".yaml", ".tpl", ".md")]
    named = {(name, str(path)) for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())}
    assert [where for where in sorted(named) if not (ROOT / where[0]).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    """Paths in backticks that begin with a top-level folder; the name of the package below it may be left out."""
    folders = "proto|router|services|kernels|bench|tests|docs|helm|k8s"
    paths = re.findall(rf"`({folders})/([\w./-]+\.\w+)`", document.read_text())
    missing = [
        f"{folder}/{rest}"
        for folder, rest in paths
        if not any(path.match(rest) for path in (ROOT / folder).rglob(Path(rest).name))
    ]
    assert missing == []


@pytest.mark.parametrize("document", prose.documents(), ids=lambda path: path.name)
def test_sentences_are_short_and_words_are_the_fields(document: Path) -> None:
    assert [f"{fault.line}: {fault.what}" for fault in prose.faults(document)] == []


def test_figures_of_the_readme_are_results() -> None:
    """Each number in bold, and each that loses, is in a table of docs/results.md."""
    section = (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n## ")[0]
    results = (ROOT / "docs" / "results.md").read_text()
    numbers = re.findall(r"\d[\d,.]*\d(?= (?:ms|GB/s|tokens)|%|\*\*| over HTTP)", section)
    assert len(numbers) > 8 and [number for number in numbers if number not in results] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document: Path) -> None:
    """`test_file.py::test_name`"""
    for name, function in re.findall(r"`(test_\w+\.py)::(\w+)`", document.read_text()):
        files = list((ROOT / "tests").rglob(name))
        assert any(f"def {function}(" in file.read_text() for file in files), f"{name}::{function}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_configuration_keys_exist(document: Path) -> None:
    """Dotted paths in backticks that begin with a section; the sections above it may be left out."""
    leaves = [leaf.split(".") for model in (RouterConfig, WorkerConfig) for leaf in config_leaves.leaves(model)]
    ends = {".".join(leaf[i:j]) for leaf in leaves for j in range(1, len(leaf) + 1) for i in range(j)}
    sections = {end.partition(".")[0] for end in ends if "." in end} - {"model", "kubernetes", "tls"}  # files, modules
    named = re.findall(rf"`((?:{'|'.join(sorted(sections))})\.[a-z_.]+)[`=]", document.read_text())
    assert {key for key in named if not key.endswith((".py", ".yaml", ".md"))} <= ends


def test_every_documented_target_has_a_recipe() -> None:
    assert {"setup", "stubs", "checkpoint", "serve", "test", "lint", "loc", "clean", "help"} <= make_targets()
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+)", listed, re.MULTILINE)) == make_targets() - {"bench"}


@pytest.mark.parametrize("document", EXECUTED, ids=lambda path: path.name)
def test_every_bash_block_has_a_run_mark(document: Path) -> None:
    text = document.read_text()
    assert text.count("```bash\n") == len(list(BLOCK.finditer(text))), "a block without a run mark is never tested"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[None]:
    """The system that both documents start, until the test ends; afterwards nothing of it is left."""
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"README's port {port} is in use on this machine")
    (command,) = {block["code"] for block in blocks("serve")}
    output = tmp_path / "output"
    with output.open("wb") as out:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, stdout=out, stderr=out, env=environment(), start_new_session=True
        )
    try:
        deadline = time.monotonic() + HANG_S
        while "Ctrl-C stops everything." not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does
        process.wait(HANG_S)
    assert "stopped" in output.read_text()


def environment() -> dict[str, str]:
    """Without what a surrounding `make test ARGS=…` tells its children."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}


@pytest.mark.e2e
@pytest.mark.long
def test_readme_commands_run_as_written(served: None) -> None:
    found = blocks(None)
    assert len(found) >= 3 and any(block["output"] for block in found)
    for block in found:
        command = block["code"]
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        assert result.stdout.strip(), f"{command} printed nothing"
        assert result.stdout == (block["output"] or result.stdout)
        assert '"error"' not in result.stdout, result.stdout
