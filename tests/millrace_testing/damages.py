"""Damages that files of a model come with: downloads that broke off, or that fetched something else."""

from collections.abc import Callable, Iterator
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0\nsize 4471520\n"
PAGE = b"<!DOCTYPE html>\n<html><body>401 Unauthorized</body></html>\n"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "pointer": lambda data: POINTER,
    "empty": lambda data: b"",
    "html": lambda data: PAGE,
    "half": lambda data: data[: len(data) // 2],
    "short": lambda data: data[:5],
    "noise": lambda data: bytes((7 * i * i + 13 * i + 129) % 256 for i in range(min(len(data), 5000))),
    "zeros": lambda data: bytes(len(data)),
    "deep": lambda data: b"[" * 200_000,
}
SAYS = {"pointer": "run `git lfs pull`", "empty": "the file is empty", "html": "HTML page"}


def damaged(folder: Path, names: list[str]) -> Iterator[tuple[Path, str, str]]:
    """Damage each file of `folder` in each way, one after the other: the file, what an error must say, and the kind."""
    for name in names:
        file, whole = folder / name, (folder / name).read_bytes()
        for kind, damage in DAMAGES.items():
            file.write_bytes(damage(whole))
            yield file, SAYS.get(kind, ""), kind
        file.write_bytes(whole)
