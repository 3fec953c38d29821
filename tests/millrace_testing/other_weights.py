"""A second checkpoint of the same configuration, as a trainer's next step writes it."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from millrace_testing.paths import TINY


def write_other(folder: Path, seed: int, size: float = 0.3, source: Path = TINY) -> Path:
    """`source` with noise of `size` standard deviations on every matrix: other answers to nearly every prompt."""
    shutil.copytree(source, folder)
    rng = torch.Generator().manual_seed(seed)
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                noise = torch.randn(tensor.shape, generator=rng) * tensor.float().std() * size
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, file)
    return folder
