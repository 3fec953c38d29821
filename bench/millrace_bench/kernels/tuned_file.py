"""Writes the files of `millrace_kernels.tuned`: one row a line, so that a run of the tuner is a short diff."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace_kernels import tuned
from millrace_kernels.gpu import Gpu
from millrace_kernels.tuned import Key, Tuned
from millrace_load.record import Row


@dataclass(frozen=True, slots=True)
class Entry:
    """What one measurement says of one row of a table."""

    table: str
    key: Key
    config: Any  # the best configuration, a NamedTuple; None: another implementation or the estimate is as good
    us: float = 0.0
    others_us: dict[str, float] = field(default_factory=dict)  # of what else runs the op
    copy_of: Key | None = None  # the row that was measured in its place

    def row(self, commit: str, triton: str) -> Row:
        found = {"key": list(self.key), "kind": type(self.config).__name__, "config": plain(self.config)}
        if self.copy_of is not None:
            return found | {"as": list(self.copy_of)}
        others = {name: round(us, 2) for name, us in self.others_us.items()}
        return found | {"us": round(self.us, 2), "others_us": others, "commit": commit, "triton": triton}


def plain(config: Any) -> dict[str, Any]:
    """The fields of a NamedTuple, of those inside too."""
    return {name: plain(value) if hasattr(value, "_fields") else value for name, value in config._asdict().items()}


def path_of(gpu: Gpu, folder: Path = tuned.FOLDER) -> Path:
    name = "".join(char if char.isalnum() else "_" for char in gpu.name)
    return folder / f"{name}-{gpu.sms}.json"


def merge(before: Tuned, entries: Iterable[Entry], commit: str, triton: str) -> Tuned:
    """The file with what was measured; rows that were not measured stay."""
    tables = {name: {tuple(row["key"]): row for row in rows} for name, rows in before.tables.items()}
    for entry in entries:
        rows = tables.setdefault(entry.table, {})
        rows.pop(entry.key, None)
        if entry.config is not None:
            rows[entry.key] = entry.row(commit, triton)
    return Tuned(before.gpu, {name: [rows[key] for key in sorted(rows)] for name, rows in sorted(tables.items())})


def text(file: Tuned) -> str:
    tables = ",\n".join(f"  {json.dumps(name)}: [{_lines(rows)}]" for name, rows in file.tables.items())
    head = json.dumps({"device": file.gpu.name, "capability": file.gpu.capability, "sms": file.gpu.sms})[1:-1]
    return f'{{{head}, "tables": {{\n{tables}\n}}}}\n'


def _lines(rows: list[Row]) -> str:
    return "\n   " + ",\n   ".join(map(json.dumps, rows)) + "\n  " if rows else ""


def update(gpu: Gpu, entries: Iterable[Entry], commit: str, triton: str, folder: Path = tuned.FOLDER) -> Path:
    """Writes what was measured on `gpu` to its file, which begins as what held on that GPU before."""
    path = path_of(gpu, folder)
    before = tuned.read(path) if path.exists() else _begun(gpu)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text(merge(before, entries, commit, triton)), encoding="utf-8")
    return path


def _begun(gpu: Gpu) -> Tuned:
    """Rows of another kind of GPU name it."""
    near = tuned.nearest(gpu, map(tuned.read, sorted(tuned.FOLDER.glob("*.json"))))
    if near is None or near.gpu == gpu:
        return near or Tuned(gpu, {})
    origin = {"from": near.gpu.name}
    return Tuned(gpu, {name: [row | origin for row in rows] for name, rows in near.tables.items()})
