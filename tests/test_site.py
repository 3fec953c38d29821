"""The site of docs/ builds without a network and without a broken link."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs-material")


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_site_builds(tmp_path: Path) -> None:
    built = build(ROOT / "mkdocs.yml", tmp_path)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "architecture.html").read_text()
    assert "The system in ten minutes" in page and (tmp_path / "search" / "search_index.json").exists()


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nowhere"])
def test_a_broken_link_fails(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n[a]({link})\n")
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    hook = "hooks: [docs/.site/hooks.py]"
    assert hook in text
    (tmp_path / "mkdocs.yml").write_text(text.replace(hook, "").partition("not_in_nav")[0])
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0 and "nowhere" in built.stderr + built.stdout
