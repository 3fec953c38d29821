"""The build of the site, which is a part of `make lint`, fails for a broken link."""

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


def test_a_broken_link_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[a](nowhere.md) [b](index.md#elsewhere)\n")
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    hook = "hooks: [docs/.site/hooks.py]"
    assert hook in text
    (tmp_path / "mkdocs.yml").write_text(text.replace(hook, "").partition("not_in_nav")[0])
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    said = built.stderr + built.stdout
    assert built.returncode != 0 and "nowhere.md" in said and "#elsewhere" in said
