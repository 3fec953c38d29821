"""A rank refuses a model whose files are damaged, in one line with the file's name, before it serves anything."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from millrace_serve.engine.config import Limits, Role
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.damages import damaged
from millrace_testing.paths import TINY

FILES = sorted(path.name for path in TINY.iterdir())
LIMITS = Limits(num_pages=17, max_model_len=256, max_prefill_tokens=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # which a rank reports as a line, without a traceback
        load_rank(LIMITS, Role.UNIFIED, folder, ParallelDims(), torch.device("cpu"), torch.float32)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


@pytest.mark.parametrize("name", FILES)
def test_each_damage_of_each_file(folder: Path, name: str) -> None:
    for file, says, kind in damaged(folder, [name]):
        message = refusal(folder)
        assert message.startswith(f"{file}: ") and says in message, (kind, message)


def test_index_that_names_a_missing_shard(folder: Path) -> None:
    """Before any tensor is read, whichever layer the shard has."""
    shard = folder / "model-00003-of-00003.safetensors"
    shard.unlink()
    assert refusal(folder) == f"{shard}: no such file or directory, but model.safetensors.index.json names it"


def test_index_that_names_a_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["model.norm.weight"] = "."
    index.write_text(json.dumps(places))
    assert refusal(folder).startswith(f"{folder}: is a directory")


def test_damaged_file_that_the_index_does_not_name_is_not_read(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"\xff" * 100)
    rank = load_rank(LIMITS, Role.UNIFIED, folder, ParallelDims(), torch.device("cpu"), torch.float32)
    rank.engine().close()
