"""Checkpoints that differ from a given one in some tensors."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
InForm = Callable[[Path, str], Path]


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def variant(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """A single-file copy of a checkpoint, without an index, with some tensors changed."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors = tensors_of(source)
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target
