"""Hooks of mkdocs.

Links that leave docs/ become text with the file's path, because the site has no such page. Diagrams are drawn by the
mermaid that `make setup` unpacks, so that a browser needs no network; without it the theme's copy comes from the web.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+)([^)\s]*)\)")
SCRIPT = "assets/mermaid.min.js"
MERMAID = Path(__file__).parents[2] / ".venv" / "mermaid" / "package" / "dist" / "mermaid.min.js"


def on_config(config: Any) -> Any:
    if MERMAID.exists():
        config.extra_javascript.append(SCRIPT)
    return config


def on_files(files: Files, config: Any) -> Files:
    if MERMAID.exists():
        files.append(File.generated(config, SCRIPT, abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = len(PurePosixPath(page.file.src_uri).parts) - 1

    def leave(match: re.Match[str]) -> str:
        text, up, path = match.groups()
        return match[0] if up.count("../") <= depth else f"{text} (`{path.partition('#')[0]}`)"

    return LINK.sub(leave, markdown)
