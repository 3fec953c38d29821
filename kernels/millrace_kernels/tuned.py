"""Configurations of kernels as they were measured: a JSON file for every kind of GPU, which
`python -m millrace_bench.kernels.tune` writes.

The file of this GPU's name and number of multiprocessors holds. Without one, that of the GPU of the same compute
capability that has the nearest number of them holds, and a warning says so; without such a file kernels estimate.

{"device": "NVIDIA H200", "capability": "sm90", "sms": 132, "tables": {"fp8_linear": [ROW, ...], ...}}
ROW: "key", a list of numbers; "kind", the name of the configuration's class; "config", its fields; and for readers
"us", "others_us" (of what else runs the op), "commit" and "triton" of the measurement, or "as", the key of which the
row is a copy.
"""

import functools
import itertools
import json
import logging
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from millrace_kernels.gpu import Gpu, gpu

FOLDER = Path(__file__).parent / "configs"
Key = tuple[int, ...]
Row = dict[str, Any]  # of the file's JSON
Config = TypeVar("Config")

log = logging.getLogger(__name__)


class Tuned(NamedTuple):
    """The file of one kind of GPU."""

    gpu: Gpu
    tables: dict[str, list[Row]]


class Table(Generic[Config]):
    """One table of the file that holds here, read at its first use."""

    def __init__(self, name: str, *kinds: type[Config]) -> None:
        self.name, self.kinds = name, {kind.__name__: kind for kind in kinds}

    @functools.cached_property
    def rows(self) -> dict[Key, Config]:
        found = loaded()
        listed = found.tables.get(self.name, []) if found else []
        return {tuple(row["key"]): _build(self.kinds[row["kind"]], row["config"]) for row in listed}

    def get(self, *key: int) -> Config | None:
        return self.rows.get(key)


@functools.cache
def loaded() -> Tuned | None:
    """The file that holds on this process's GPU."""
    here = gpu()
    found = nearest(here, map(read, sorted(FOLDER.glob("*.json"))))
    if found is None:
        log.warning("no kernel was tuned on %s: configurations for this %s are estimates", here.capability, here)
    elif found.gpu != here:
        log.warning("no kernel was tuned on this %s: the configurations of an %s are used", here, found.gpu)
    rows = itertools.chain.from_iterable(found.tables.values()) if found else ()
    if found and (others := {row["triton"] for row in rows if "triton" in row} - {metadata.version("triton")}):
        log.info("kernels of %s were tuned with Triton %s, which is not installed", found.gpu, ", ".join(others))
    return found


def nearest(here: Gpu, files: Iterable[Tuned]) -> Tuned | None:
    """The file of this kind of GPU, else of the one of the same capability with the nearest number of SMs."""
    same = [file for file in files if file.gpu.capability == here.capability]
    return min(same, key=lambda file: (file.gpu != here, abs(file.gpu.sms - here.sms), file.gpu), default=None)


def read(path: Path) -> Tuned:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Tuned(Gpu(content["device"], content["capability"], content["sms"]), content["tables"])


def _build(kind: type[Config], fields: Row) -> Config:
    hints = get_type_hints(kind)
    return kind(**{k: _build(hints[k], value) if isinstance(value, dict) else value for k, value in fields.items()})
