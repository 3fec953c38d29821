"""What makes the JSON of a run evidence: a clean commit, the command, and the locked versions of what it measured."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace_load.record import ROOT

NAMED = re.compile(r"bench/results/(\w+/[\w-]+)\.json")
LOCK = ROOT / "requirements" / "constraints-gpu.txt"


def named(documents: Iterable[Path]) -> list[str]:
    """Runs that the documents link to: "h200/engine-tp8"."""
    return sorted({name for document in documents for name in NAMED.findall(document.read_text())})


def locked(file: Path = LOCK) -> dict[str, str]:
    """Versions of packages that GPU images have."""
    lines = (line.partition("==") for line in file.read_text().splitlines())
    return {name: version for name, equals, version in lines if equals}


def faults(record: Mapping[str, Any], lock: Mapping[str, str]) -> Iterator[str]:
    """What a record lacks as evidence. Versions count where GPUs ran."""
    versions = record.get("versions") or {}
    commit = versions.get("commit")
    if not commit:
        yield "no commit"
    elif commit.endswith("-dirty"):
        yield "changes that were not committed"
    if not record.get("command") or record["command"].startswith("ad hoc"):
        yield "no command"
    if "NVIDIA" in str(record.get("hardware")):
        for name, version in versions.items():
            if name in lock and version.partition("+")[0] != lock[name]:
                yield f"{name} {version}, not {lock[name]}"


def stale(documents: Iterable[Path]) -> dict[str, list[str]]:
    """Named runs that are no evidence, and why."""
    lock = locked()
    found = {name: list(faults(record(name), lock)) for name in named(documents)}
    return {name: reasons for name, reasons in found.items() if reasons}


def record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return loaded
