"""Quantises a checkpoint, in the formats in which DeepSeek V3 and R1 are published.

    python -m millrace_serve.model.checkpoint.export_quantised SRC DST --form int8-block

    fp8          E4M3, one float32 `weight_scale_inv` per 128 x 128 block, as DeepSeek published V3
    int8-block   INT8 with the same blocks, as meituan/DeepSeek-R1-Block-INT8
    int8         INT8, one float32 `weight_scale` per output channel, as meituan/DeepSeek-R1-Channel-INT8

1. SRC's config must be one that we can run, and must not be quantised already.
2. Tensor by tensor, in the order of SRC's files: linear weights of attention, MLPs and experts become quantised ones
   and scales; embeddings, head, norms, the gate and its bias, and MTP's `eh_proj` stay as they are. Shards are written
   on the way, so the memory needed is that of one shard, whatever the size of the model.
3. Everything else in SRC (tokenizer, generation config, licence) is copied; config.json gets `quantization_config`.
4. All of this happens in a temporary folder beside DST, which is renamed to DST at the end.

Which tensors are quantised is read off the tensor list of the published deepseek-ai/DeepSeek-V3 and V3.2.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from millrace_kernels.fp8 import BLOCK, quant_blocks
from millrace_kernels.int8 import Int8, quant_rows
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace_serve.model.checkpoint.shard_writer import write_json, write_shards
from millrace_serve.model.config import BLOCKS, CONFIG_FILE, ModelConfig, ModelConfigError
from millrace_serve.model.quantised import FORMS, Quantised, form_of
from millrace_serve.model.weights import INDEX_FILE, CheckpointError, checkpoint_files

log = logging.getLogger(__name__)

QUANTIZATIONS = {  # `quantization_config` of each form
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", **BLOCKS},
    "int8": {"quant_method": "w8a8_int8", "activation_scheme": "dynamic"},
    "int8-block": {"quant_method": "blockwise_int8", **BLOCKS},
}
QUANTISED = re.compile(
    r"model\.layers\.\d+\."
    r"(self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.(wq_b|wk))"
    r"|mlp\.((shared_experts|experts\.\d+)\.)?(gate_proj|up_proj|down_proj))\.weight"
)
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SHARD_BYTES = 4 << 30


def export(source: Path, target: Path, form: str = "fp8", max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Makes the folder `target`, or leaves nothing behind.

    Raises:
        ModelConfigError, CheckpointError: `source` cannot be quantised; a message about weights names the tensor.
        FileExistsError: `target` exists.
        OSError: reading or writing failed.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(source, temporary, form, max_shard_bytes)
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _convert(source: Path, folder: Path, form: str, max_shard_bytes: int) -> None:
    if form_of(model := ModelConfig.load(source)) is not None or model.int4_experts:
        raise ModelConfigError(f"{source / CONFIG_FILE}: quantization_config: the checkpoint is already quantised")
    write_shards(folder, _quantised(source, form), max_shard_bytes)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in (CONFIG_FILE, INDEX_FILE) and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    write_json(folder / CONFIG_FILE, {**config, "quantization_config": QUANTIZATIONS[form]})


def quantise(name: str, tensor: Tensor, form: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that take the place of one: itself, or data and scales. CheckpointError names the tensor."""
    if not QUANTISED.fullmatch(name):
        yield name, tensor
        return
    if tensor.ndim != 2 or tensor.dtype not in SOURCE_DTYPES:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise CheckpointError(f"tensor {name} is {found}, expected a matrix of BF16, F16 or F32")
    if not tensor.isfinite().all():
        raise CheckpointError(f"tensor {name} has values that are not finite")
    data, scales = _matrix(tensor, form)
    yield name, data
    yield name + FORMS[form].suffix, scales if FORMS[form].by_block else scales[:, None]


def _matrix(weight: Tensor, form: str) -> Quantised:
    if form == "fp8":
        return quant_blocks(weight)
    if form == "int8":
        return quant_rows(weight.float())
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
    n, k = blocks.shape[0] // BLOCK, blocks.shape[1] // BLOCK
    rows = quant_rows(blocks.view(n, BLOCK, k, BLOCK).transpose(1, 2).reshape(n * k, -1))
    data = rows.data.view(n, k, BLOCK, BLOCK).transpose(1, 2).reshape(blocks.shape)
    return Int8(data[: weight.shape[0], : weight.shape[1]].contiguous(), rows.scales.view(n, k))


def _quantised(source: Path, form: str) -> Iterator[tuple[str, Tensor]]:
    files = checkpoint_files(source)
    for number, (file, names) in enumerate(files.items(), start=1):
        log.info("%s (%d of %d)", file.name, number, len(files))
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in names or tensors.keys():
                    yield from quantise(name, tensors.get_tensor(name), form)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Quantise a checkpoint.")
    parser.add_argument("source", type=Path, metavar="SRC", help="checkpoint folder in BF16, F16 or F32")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to make")
    parser.add_argument("--form", choices=FORMS, default="fp8", help="form of the weights (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        export(arguments.source, arguments.target, arguments.form)
    except (ModelConfigError, CheckpointError, OSError) as error:
        sys.exit(f"export_quantised: {error}")


if __name__ == "__main__":
    main()
