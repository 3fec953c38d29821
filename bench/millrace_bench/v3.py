"""DeepSeek-V3's shapes for benches with random weights: as keywords of ModelConfig, or as a folder that a worker starts
from with `random_weights=true`. bench/data/v3.yaml has them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from millrace_cli.cluster import TINY as TOKENIZER

from millrace_bench.data import read_data

SHAPES: dict[str, dict[str, Any]] = read_data("v3.yaml")
V3, TINY, SPARSE, WIDTHS = (SHAPES[name] for name in ("v3", "tiny", "sparse", "widths"))
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
