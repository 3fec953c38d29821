"""What names a checkpoint: its content, wherever it lies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from millrace_serve.model.checkpoint.checkpoint_hash import SAMPLE_BYTES, SAMPLES, checkpoint_hash
from millrace_testing.paths import TINY
from safetensors.torch import load_file, save_file


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "copy")
    return tmp_path / "copy"


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def negate(folder: Path) -> None:
    weights = load_file(first_file(folder))
    save_file({name: -tensor for name, tensor in weights.items()}, first_file(folder), {"format": "pt"})


def rename_a_tensor(folder: Path) -> None:
    data = first_file(folder).read_bytes()
    first_file(folder).write_bytes(data.replace(b'proj.weight"', b'proj.wEight"', 1))


def change_the_last_byte(folder: Path) -> None:
    data = bytearray(first_file(folder).read_bytes())
    data[-1] ^= 1
    first_file(folder).write_bytes(data)


def change_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


def drop_a_file(folder: Path) -> None:
    first_file(folder).unlink()


def test_copy_is_the_same_checkpoint(copy: Path) -> None:
    assert checkpoint_hash(copy) == checkpoint_hash(TINY)


@pytest.mark.parametrize("change", [negate, rename_a_tensor, change_the_last_byte, change_the_config, drop_a_file])
def test_change_makes_another_checkpoint(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    assert checkpoint_hash(copy) != checkpoint_hash(TINY)


@pytest.mark.parametrize("size", [1, SAMPLE_BYTES - 1, SAMPLE_BYTES * SAMPLES // 2, SAMPLE_BYTES * SAMPLES - 7])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    data, seen = torch.zeros(size, dtype=torch.uint8), set()
    places = {0, size // 3, size // 2, size - 1}
    for place in places:
        data.zero_()
        data[place] = 1
        save_file({"weight": data}, tmp_path / "model.safetensors")
        seen.add(checkpoint_hash(tmp_path))
    assert len(seen) == len(places)
