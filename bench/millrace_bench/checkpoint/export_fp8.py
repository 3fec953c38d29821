"""Quantises a checkpoint as DeepSeek published V3: E4M3 weights, one float32 `weight_scale_inv` per 128 x 128 block.

    python -m millrace_bench.checkpoint.export_fp8 SRC DST

1. SRC's config must be one that we can run, and must not be quantised already.
2. Tensor by tensor, in the order of SRC's files: linear weights of attention, MLPs and experts become E4M3 and a scale;
   embeddings, head, norms, the gate and its bias, and MTP's `eh_proj` stay as they are. Shards are written on the way,
   so the memory needed is that of one shard, whatever the size of the model.
3. Everything else in SRC (tokenizer, generation config, licence) is copied; config.json gets `quantization_config`.
4. All of this happens in a temporary folder beside DST, which is renamed to DST at the end.

Which tensors are FP8 is read off the tensor list of the published deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from millrace_kernels.fp8 import quant_blocks
from millrace_serve.model.config import CONFIG_FILE, ConfigError, ModelConfig
from millrace_serve.model.weights import INDEX_FILE, SCALE_SUFFIX, CheckpointError, checkpoint_files
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace_bench.checkpoint.shard_writer import write_json, write_shards

log = logging.getLogger(__name__)

QUANTIZATION = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QUANTISED = re.compile(
    r"model\.layers\.\d+\."
    r"(self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
    r"|mlp\.((shared_experts|experts\.\d+)\.)?(gate_proj|up_proj|down_proj))\.weight"
)
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SHARD_BYTES = 4 << 30


def export(source: Path, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Makes the folder `target`, or leaves nothing behind.

    Raises:
        ConfigError, CheckpointError: `source` cannot be quantised; a message about weights names the tensor.
        FileExistsError: `target` exists.
        OSError: reading or writing failed.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(source, temporary, max_shard_bytes)
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(source: Path, folder: Path, max_shard_bytes: int) -> None:
    started = time.monotonic()
    if ModelConfig.load(source).fp8_blocks:
        raise ConfigError(f"{source / CONFIG_FILE}: quantization_config: the checkpoint is quantised already")
    write_shards(folder, _quantised(source), max_shard_bytes)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in (CONFIG_FILE, INDEX_FILE) and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    write_json(folder / CONFIG_FILE, {**config, "quantization_config": QUANTIZATION})
    log.info("%s quantised in %.1f s", source, time.monotonic() - started)


def quantise(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that take the place of one: itself, or E4M3 and its scales. CheckpointError names the tensor."""
    if not QUANTISED.fullmatch(name):
        yield name, tensor
        return
    if tensor.ndim != 2 or tensor.dtype not in SOURCE_DTYPES:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"tensor {name} is {found}, expected a matrix of BF16, F16 or F32")
    if not tensor.isfinite().all():
        raise CheckpointError(f"tensor {name} has values that are not finite")
    quantised, scales = quant_blocks(tensor)
    yield name, quantised
    yield name + SCALE_SUFFIX, scales


def _quantised(source: Path) -> Iterator[tuple[str, Tensor]]:
    files = checkpoint_files(source)
    for number, (file, names) in enumerate(files.items(), start=1):
        log.info("%s (%d of %d)", file.name, number, len(files))
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in names or tensors.keys():
                    yield from quantise(name, tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Quantise a checkpoint to FP8 with 128 x 128 blocks.")
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder in BF16, F16 or F32")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to make")
    arguments = parser.parse_args()
    try:
        export(arguments.source, arguments.target)
    except (ConfigError, CheckpointError, OSError) as error:
        sys.exit(f"export_fp8: {error}")


if __name__ == "__main__":
    main()
