"""The published layout of DeepSeek-V3 checkpoints: writes a trained model to it, reads one back.

Files: config.json, generation_config.json, model-*.safetensors with their index. `tokenizer` writes the tokenizer's.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace_training.config import BOS_ID, EOS_ID, ModelConfig
from millrace_training.model import DeepseekV3

INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 4_500_000
FLOAT32 = ("e_score_correction_bias",)


def published_tensors(model: DeepseekV3) -> dict[str, Tensor]:
    """Public name -> CPU tensor, bfloat16 but for the correction biases; MTP has copies of embedding and head."""
    state = {_published_name(name, model.config): tensor for name, tensor in model.state_dict().items()}
    mtp = f"model.layers.{model.config.num_hidden_layers}"
    state[f"{mtp}.embed_tokens.weight"] = state["model.embed_tokens.weight"]
    state[f"{mtp}.shared_head.head.weight"] = state["lm_head.weight"]
    return {
        name: tensor.detach()
        .to("cpu", torch.float32 if name.endswith(FLOAT32) else torch.bfloat16, copy=True)
        .contiguous()
        for stacked, value in sorted(state.items(), key=lambda pair: _order(pair[0]))
        for name, tensor in _unstacked(stacked, value)
    }


def _published_name(name: str, config: ModelConfig) -> str:
    mtp = f"model.layers.{config.num_hidden_layers}."
    if name == "lm_head.weight":
        return name
    if name.startswith("mtp.layer."):
        return mtp + name.removeprefix("mtp.layer.")
    if name == "mtp.norm.weight":
        return f"{mtp}shared_head.norm.weight"
    return mtp + name.removeprefix("mtp.") if name.startswith("mtp.") else f"model.{name}"


def _order(name: str) -> tuple[int, str]:
    parts = name.split(".")
    return (int(parts[2]), name) if parts[1] == "layers" else (-1, name)


def _unstacked(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if ".experts." not in name:
        yield name, value
        return
    prefix, projection = name.split(".experts.")
    for expert, weight in enumerate(value):
        yield f"{prefix}.experts.{expert}.{projection}.weight", weight


def save(model: DeepseekV3, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", model.config.published())
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    _write_json(directory / "generation_config.json", generation)
    tensors = published_tensors(model)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(held.nbytes for held in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def load(directory: Path, device: str = "cpu") -> DeepseekV3:
    """The model as published: parameters bfloat16, correction biases float32; in evaluation mode."""
    config = ModelConfig.from_published(json.loads((directory / "config.json").read_text("utf-8")))
    files = set(json.loads((directory / INDEX_FILE).read_text("utf-8"))["weight_map"].values())
    tensors = {name: tensor for file in sorted(files) for name, tensor in load_file(directory / file).items()}
    model = DeepseekV3(config)
    state = {name: _stacked(_published_name(name, config), tensors, config) for name in model.state_dict()}
    model.load_state_dict(state)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model.to(device).eval()


def _stacked(name: str, tensors: dict[str, Tensor], config: ModelConfig) -> Tensor:
    if ".experts." not in name:
        return tensors[name]
    prefix, projection = name.split(".experts.")
    return torch.stack([tensors[f"{prefix}.experts.{e}.{projection}.weight"] for e in range(config.n_routed_experts)])


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
