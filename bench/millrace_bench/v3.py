"""DeepSeek-V3's shapes for benches with random weights: as keywords of ModelConfig, or as a folder that a worker starts
from with `random_weights=true`.

    v3     the whole width: a layer with experts takes 11.5 GB in FP8, so a few layers fit on one GPU
    tp8    what one of 8 tensor-parallel ranks has of it: all 61 layers fit on one GPU, and nobody needs the other ranks
    e32    the whole width with 32 experts in one group: all 61 layers fit on one H200
    e64    the whole width with 64 experts, and e128: all 61 layers fit on two H200s and on four
    tiny   for a dry run on a CPU

SPARSE on top of either makes V3.2 of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from millrace_cli.cluster import TINY as TOKENIZER

V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "fp8_blocks": True,
}
TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "first_k_dense_replace": 1,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 16,
    "max_position_embeddings": 512,
}
SPARSE = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
WIDTHS: dict[str, dict[str, Any]] = {
    "v3": {},
    "tp8": {"vocab_size": 16160, "num_attention_heads": 16, "intermediate_size": 2304, "moe_intermediate_size": 256},
    "e32": {"n_routed_experts": 32, "n_group": 1, "topk_group": 1},
    "e64": {"n_routed_experts": 64},
    "e128": {"n_routed_experts": 128},
    "tiny": {**TINY, "num_attention_heads": 2, "intermediate_size": 256, "moe_intermediate_size": 128},
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def write_folder(folder: Path, widths: str, layers: int) -> Path:
    """config.json of `widths`, and the tokenizer of models/tiny, whose ids every vocabulary here has. -> folder"""
    shape = {**V3, **WIDTHS[widths]}
    del shape["fp8_blocks"]  # the published way to say so is FP8
    facts = {"model_type": "deepseek_v3", "eos_token_id": 1, "quantization_config": FP8}
    facts |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**shape, **facts}, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    return folder
