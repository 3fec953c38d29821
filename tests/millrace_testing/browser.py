"""Chromium without a window: the one that `make test` unpacks, or any on PATH."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millrace_testing.paths import ROOT

if TYPE_CHECKING:
    from playwright.async_api import Browser

UNPACKED = ROOT / ".venv" / "chromium"
NAMES = ("chromium", "chromium-headless-shell", "google-chrome")
FONTS = """<?xml version="1.0"?>
<fontconfig><dir>{folder}</dir><cachedir>{cache}</cachedir></fontconfig>"""


def find() -> str | None:
    path = os.pathsep.join((str(UNPACKED), os.environ.get("PATH", "")))
    return next(filter(None, (shutil.which(name, path=path) for name in NAMES)), None)


needs_browser = pytest.mark.skipif(
    find() is None or importlib.util.find_spec("playwright") is None,
    reason="needs playwright, and chromium on PATH or where `make test` unpacks it",
)


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    """`folder`: for its files."""
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        started = await driver.chromium.launch(executable_path=find(), env=environment(folder), args=["--disable-gpu"])
        try:
            yield started
        finally:
            await started.close()


def environment(folder: Path) -> dict[str, str]:
    """The unpacked libraries and fonts, if they are there: without any font a page has no text."""
    if not (UNPACKED / "fonts").is_dir():
        return dict(os.environ)
    settings = folder / "fonts.conf"
    settings.write_text(FONTS.format(folder=UNPACKED / "fonts", cache=folder / "font-cache"))
    libraries = os.pathsep.join(filter(None, (str(UNPACKED / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(settings)}
