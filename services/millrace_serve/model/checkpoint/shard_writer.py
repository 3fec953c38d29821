"""Writes tensors as a sharded checkpoint while they are made, with at most one shard in memory."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from millrace_common.json_values import Json
from safetensors.torch import save_file
from torch import Tensor

from millrace_serve.model.weights import INDEX_FILE

log = logging.getLogger(__name__)


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    """`model-00001-of-0000N.safetensors` … and their index, in the order of `tensors`. A tensor larger than
    `max_shard_bytes` gets a shard of its own. Raises OSError.
    """
    names: list[list[str]] = []  # by shard
    shard: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            names.append(_save(folder / _unnamed(len(names)), shard))
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    names.append(_save(folder / _unnamed(len(names)), shard))
    files = [f"model-{index:05d}-of-{len(names):05d}.safetensors" for index in range(1, len(names) + 1)]
    for index, file in enumerate(files):  # the number of shards is known only now
        (folder / _unnamed(index)).rename(folder / file)
    weight_map = {name: file for file, held in zip(files, names, strict=True) for name in held}
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _unnamed(index: int) -> str:
    return f"shard-{index}.part"


def _save(path: Path, shard: dict[str, Tensor]) -> list[str]:
    save_file(shard, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it private
    log.info("%s: %d tensors, %.1f MB", path.stem, len(shard), path.stat().st_size / 1e6)
    return list(shard)
