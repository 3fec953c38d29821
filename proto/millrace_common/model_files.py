"""Reads the files of a model's folder. Each error is one line that names the file and what is wrong with it."""

import json
from pathlib import Path

from millrace_common.json_values import JsonObject

HEAD_BYTES = 64
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def fault(head: bytes) -> str:
    """What the first HEAD_BYTES of a file show that no file of a model is; "" where they show nothing."""
    if not head.strip():
        return "the file is empty" if not head else ""
    if head.startswith(LFS_POINTER):
        return "this is a Git LFS pointer, not the file that it stands for: run `git lfs pull` in its folder"
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "this is an HTML page, so the download has failed"
    return ""


def check_file(path: Path) -> None:
    """Raises ValueError for a file that cannot be read, is empty, a Git LFS pointer or an HTML page."""
    try:
        with path.open("rb") as file:
            why = fault(file.read(HEAD_BYTES))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
    if why:
        raise ValueError(f"{path}: {why}")


def read_text(path: Path) -> str:
    """Raises ValueError, as `check_file` does, and for bytes that are not UTF-8."""
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as text: {error}") from None


def read_object(path: Path) -> JsonObject:
    """A JSON object. Raises ValueError, as `read_text` does, and for anything else than a JSON object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object, found {type(value).__name__}")
    return value
