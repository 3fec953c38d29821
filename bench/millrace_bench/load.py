"""How fast a checkpoint is read: bytes/s of our loader beside the limit of disk and page cache, and beside
fastsafetensors where that is installed.

    raw              the files, read from beginning to end into one buffer
    ours             `load_model`: every tensor checked, cut, and copied to the device
    fastsafetensors  the files' tensors, as they are, on the device

Cold: the files are not in the page cache. All three in turns, several rounds, the best of each.

python -m millrace_bench.load                          4 layers that it writes to a temporary folder, 3.3 GB
python -m millrace_bench.load --model FOLDER --device cuda
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from millrace_load.record import Record, print_record
from millrace_serve.model.checkpoint.headers import Headers
from millrace_serve.model.checkpoint.random_weights import META, RandomWeights
from millrace_serve.model.checkpoint.shard_writer import write_shards
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import PLAIN
from millrace_serve.model.weights import Shape, checkpoint_files

from millrace_bench import v3

WIDTHS = {  # narrow enough for a machine without GPU; experts as large as those of a rank of V3
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 80,
    "vocab_size": 4096,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
}
SHARD_BYTES, READ_BYTES = 1 << 30, 1 << 22
GB = 1e9


class Names(Headers):
    """Writes down the tensors that a model asks for, in the place of a checkpoint that has them."""

    def __init__(self) -> None:
        RandomWeights.__init__(self, META, torch.bfloat16, PLAIN)
        self.shapes: dict[str, Shape] = {}

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        self.shapes[name] = shape


def write_model(folder: Path) -> Path:
    """A checkpoint of WIDTHS in BF16, all of one number: only its bytes matter."""
    raw = {**v3.V3, **WIDTHS, "model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    del raw["fp8_blocks"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    names = Names()
    DeepseekV3(names, ModelConfig.load(folder), ParallelDims())
    tensors = ((name, torch.ones(shape, dtype=torch.bfloat16)) for name, shape in names.shapes.items())
    write_shards(folder, tensors, SHARD_BYTES)
    return folder


def read_raw(files: Sequence[Path], device: torch.device) -> None:
    buffer = bytearray(READ_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def read_fast(files: Sequence[Path], device: torch.device) -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]

    loader = SafeTensorsFileLoader(SingleGroup(), str(device), nogds=True)
    loader.add_filenames({0: [str(file) for file in files]})
    buffer = loader.copy_files_to_device()
    for name in loader.get_keys():
        buffer.get_tensor(name)
    buffer.close()
    loader.close()


def forget(files: Sequence[Path]) -> None:
    """Take the files out of the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(read: Callable[[], object], device: torch.device) -> float:
    gc.collect()
    begin = time.perf_counter()
    kept = read()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - begin
    del kept
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m millrace_bench.load", description="Bytes/s of loading weights.")
    parser.add_argument("--model", type=Path, help="Checkpoint folder. Default: one that is written for this.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-load-") as folder:
        model, device = args.model or write_model(Path(folder) / "model"), torch.device(args.device)
        files = list(checkpoint_files(model))
        readers: dict[str, Callable[[], object]] = {
            "raw": lambda: read_raw(files, device),
            "ours": lambda: load_model(model, ParallelDims(), device, torch.bfloat16, mtp=False),
        }
        if importlib.util.find_spec("fastsafetensors"):
            readers["fastsafetensors"] = lambda: read_fast(files, device)
        size = sum(file.stat().st_size for file in files)
        best: dict[tuple[str, str], float] = {}
        for _ in range(args.rounds):
            for name, read in readers.items():
                forget(files)
                for cache in ("cold", "warm"):
                    rate = size / seconds(read, device) / GB
                    best[name, cache] = max(rate, best.get((name, cache), 0.0))
                    print(f"{name:16} {cache}: {rate:.2f} GB/s", flush=True)
    rows = [{"reader": name, "pages": cache, "gb_per_s": round(rate, 2)} for (name, cache), rate in best.items()]
    print_record(Record("load", vars(args), {"bytes": size, "rows": rows}))


if __name__ == "__main__":
    main()
