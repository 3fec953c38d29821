"""Copies of checkpoints with routed experts in INT4, as Kimi K2 Thinking is published (compressed-tensors, packed)."""

import json
import shutil
from pathlib import Path

import torch
from millrace_serve.model.config import CONFIG_FILE
from millrace_serve.model.weights import INDEX_FILE
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
}


def write_int4(folder: Path, source: Path) -> Path:
    shutil.copytree(source, folder)
    raw = {**json.loads((source / CONFIG_FILE).read_text()), "quantization_config": QUANTIZATION}
    (folder / CONFIG_FILE).write_text(json.dumps(raw))
    weight_map: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {new: part for name, tensor in load_file(file).items() for new, part in _published(name, tensor)}
        save_file(tensors, file)
        weight_map |= dict.fromkeys(tensors, file.name)
    if (folder / INDEX_FILE).exists():
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values int [N, K] from -8 to 7 and scales bfloat16 [N, K / 32]."""
    groups = weight.float().view(len(weight), -1, 32)
    scales = (groups.abs().amax(-1) / 7.5).bfloat16()
    return (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).view(weight.shape).int(), scales


def pack(values: Tensor) -> Tensor:
    """int [N, K] from -8 to 7 -> int32 [N, K / 8], the first value in the lowest bits."""
    words = ((values.long() + 8).view(len(values), -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32)  # the highest bit becomes the sign


def rounded(weight: Tensor) -> Tensor:
    """float32, what INT4 leaves of a weight."""
    values, scales = quantise(weight)
    return values * scales.float().repeat_interleave(32, 1)


def _published(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if ".mlp.experts." not in name:
        return [(name, tensor)]
    values, scales = quantise(tensor)
    shape = torch.tensor(tensor.shape, dtype=torch.int32)
    return [(f"{name}_packed", pack(values)), (f"{name}_scale", scales), (f"{name}_shape", shape)]
