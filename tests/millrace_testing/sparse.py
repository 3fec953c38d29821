"""A checkpoint of V3.2's architecture: a copy of V3's with a random indexer in each layer, the MTP layer included."""

import json
import shutil
from pathlib import Path

import torch
from millrace_serve.model.config import CONFIG_FILE, ModelConfig
from safetensors.torch import load_file, save_file

from millrace_testing.paths import TINY

INDEXER = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 24}  # most prompts of tests are longer


def write_sparse(folder: Path, source: Path = TINY, **indexer: int) -> Path:
    """`indexer`: keys of config.json instead of those of INDEXER."""
    shutil.copytree(source, folder)
    raw = {**json.loads((source / CONFIG_FILE).read_text()), **INDEXER, **indexer, "model_type": "deepseek_v32"}
    (folder / CONFIG_FILE).write_text(json.dumps(raw))
    config, rng = ModelConfig.load(folder), torch.Generator().manual_seed(32)
    heads, width, rank = config.index_n_heads, config.index_head_dim, config.q_lora_rank
    assert rank is not None
    file, tensors = sorted(folder.glob("*.safetensors"))[-1], {}
    for layer in range(config.num_kv_layers):
        prefix = f"model.layers.{layer}.self_attn.indexer"
        for name, rows, cols in (
            ("wq_b", heads * width, rank),
            ("wk", width, config.hidden_size),
            ("weights_proj", heads, config.hidden_size),
        ):
            noise = torch.randn(rows, cols, generator=rng) * cols**-0.5
            tensors[f"{prefix}.{name}.weight"] = noise.bfloat16()
        tensors[f"{prefix}.k_norm.weight"] = 1 + 0.1 * torch.randn(width, generator=rng)
        tensors[f"{prefix}.k_norm.bias"] = 0.1 * torch.randn(width, generator=rng)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())
        shards["weight_map"] |= dict.fromkeys(tensors, file.name)
        index.write_text(json.dumps(shards))
    save_file(load_file(file) | tensors, file)
    return folder
