"""A hook of mkdocs: links that leave docs/ become text with the file's path, because the site has no such page."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+)([^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = len(PurePosixPath(page.file.src_uri).parts) - 1

    def leave(match: re.Match[str]) -> str:
        text, up, path = match.groups()
        return match[0] if up.count("../") <= depth else f"{text} (`{path.partition('#')[0]}`)"

    return LINK.sub(leave, markdown)
