"""Reads a public checkpoint directory: each rank reads its slices only, each tensor is checked where it is used.

1. `Checkpoint(dir, config, device, dtype)` reads the headers: name -> file, from `*.safetensors` or the shards' index.
2. The modules of the model take their tensors by public name with the shape that the config implies: `tensor` for
   tensors in the compute dtype, `matrix` and `stack` for the weights of a GEMM, which stay in FP8 where the checkpoint
   and the device have it.
3. `finish()` refuses a checkpoint that holds weights which the config does not describe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from millrace_kernels.fp8 import BLOCK, Fp8, dequant_blocks
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace_serve.model.config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"
FLOATS = ("BF16", "F16", "F32")
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

Shape = tuple[int, ...]
Slice = tuple[int, int]  # half-open


def keeps_fp8(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products run on the FP8 weights of a checkpoint themselves: on GPUs, whose kernels give BF16. For other
    activations, and on CPUs, weights are dequantised.
    """
    return config.fp8_blocks and device.type == "cuda" and dtype == torch.bfloat16


class CheckpointError(ValueError):
    """The checkpoint is unreadable or does not match its config; the message names the tensor."""


class Part(NamedTuple):
    """What this rank holds of a matrix; None stands for all rows or all columns."""

    rows: Slice | None = None
    cols: Slice | None = None

    def of(self, shape: Shape) -> tuple[Slice, Slice]:
        return self.rows or (0, shape[0]), self.cols or (0, shape[1])


WHOLE = Part()


class Weights(Protocol):
    """The source of the model's tensors: a `Checkpoint`, or random numbers of the same shapes. `shape` is always that
    of the whole tensor in the checkpoint.
    """

    device: torch.device
    dtype: torch.dtype
    fp8: bool  # matrices may stay in FP8

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the device, in `dtype` (None: the compute dtype)."""
        ...

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Tensor | Fp8:
        """The weight [N, K] of a GEMM, which may stay in FP8."""
        ...

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Tensor | Fp8:
        """[len(names), sum of the rows, K]: the matrices of each entry on top of each other, all of one `shape`."""
        ...

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        """A tensor that belongs to the model and that this rank does not read: it must have the right shape, and exist
        unless it is `optional`.
        """
        ...


class Checkpoint:
    def __init__(
        self,
        directory: str | Path,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep_fp8: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.config = config
        self.device = device
        self.dtype = dtype
        self.fp8 = keep_fp8 and config.fp8_blocks
        self._files: dict[Path, Any] = {}
        files = checkpoint_files(self.directory).items()
        self._file_of = {name: file for file, names in files for name in names or self._open(file).keys()}
        self._unclaimed = set(self._file_of)

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        """FP8 weights are dequantised; a part of them may begin inside of a block."""
        stored, dtype = self._stored(name, shape), dtype or self.dtype
        taken = _take(stored, *part)
        if stored.get_dtype() == "F8_E4M3":
            rows, cols = part.of(shape)
            taken = dequant_blocks(taken, self._scales(name, shape, part), dtype, rows[0] % BLOCK, cols[0] % BLOCK)
        return taken.to(device=self.device, dtype=dtype, copy=True)  # never a view of the mapped file

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Tensor | Fp8:
        """FP8 stays FP8 when the rank's part begins at a block and K is whole blocks."""
        rows, cols = part.of(shape)
        aligned = not (rows[0] % BLOCK or cols[0] % BLOCK or (cols[1] - cols[0]) % BLOCK)
        stored = self._stored(name, shape)
        if not (self.fp8 and aligned and stored.get_dtype() == "F8_E4M3"):
            return self.tensor(name, shape, part)
        return Fp8(*(x.to(self.device, copy=True) for x in (_take(stored, *part), self._scales(name, shape, part))))

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Tensor | Fp8:
        out: Tensor | Fp8 | None = None
        for index, entry in enumerate(names):
            one = stack_rows([self.matrix(name, shape, part) for name in entry], self.dtype)
            if out is None:
                out = _map(lambda x: x.new_empty(len(names), *x.shape), one)
            for target, source in zip(_tensors(out), _tensors(one), strict=True):
                target[index].copy_(source)
        assert out is not None, "nothing to stack"
        return out

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        if name in self._file_of or not optional:
            self._header(name, shape, (*FLOATS, "F8_E4M3"))
            self._unclaimed.discard(name + SCALE_SUFFIX)

    def skip(self, prefix: str) -> None:
        """Tensors that the config describes and this process does not need."""
        self._unclaimed = {name for name in self._unclaimed if not name.startswith(prefix)}

    def finish(self) -> None:
        """Raises CheckpointError if the checkpoint has tensors that the config does not describe."""
        left = sorted(name for name in self._unclaimed if not name.endswith(IGNORED_SUFFIXES))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise CheckpointError(f"{self.directory}: tensors that config.json does not describe: {shown}")
        self._files.clear()

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from None
        return self._files[file]

    def _header(self, name: str, shape: Shape, dtypes: tuple[str, ...]) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing (expected shape {list(shape)})")
        file = self._file_of[name]
        try:
            stored = self._open(file).get_slice(name)
        except SafetensorError:
            raise CheckpointError(f"{file}: tensor {name} is missing (expected shape {list(shape)})") from None
        if tuple(stored.get_shape()) != shape:
            raise CheckpointError(f"{file}: tensor {name} has shape {stored.get_shape()}, expected {list(shape)}")
        if stored.get_dtype() not in dtypes:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {stored.get_dtype()}, expected one of {', '.join(dtypes)}"
            )
        self._unclaimed.discard(name)
        return stored

    def _stored(self, name: str, shape: Shape) -> Any:
        quantised = self.config.fp8_blocks and len(shape) == 2
        return self._header(name, shape, (*FLOATS, "F8_E4M3") if quantised else FLOATS)

    def _scales(self, name: str, shape: Shape, part: Part) -> Tensor:
        """float32, of the blocks that the part touches."""
        scale_shape = tuple(-(-size // BLOCK) for size in shape)
        blocks = ((start // BLOCK, -(-stop // BLOCK)) for start, stop in part.of(shape))
        return _take(self._header(name + SCALE_SUFFIX, scale_shape, ("F32",)), *blocks)


def checkpoint_files(directory: Path) -> dict[Path, list[str]]:
    """Weight file -> the tensors that the index places there; without an index an empty list, which means all.

    Raises:
        CheckpointError: the index is malformed, or there are no weights.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (files := sorted(directory.glob("*.safetensors"))):
            raise CheckpointError(f"{directory}: no {INDEX_FILE} and no *.safetensors")
        return {file: [] for file in files}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index}: malformed index: {error}") from None
    found: dict[Path, list[str]] = {directory / file: [] for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        found[directory / file].append(name)
    return found


def stack_rows(parts: Sequence[Tensor | Fp8], dtype: torch.dtype) -> Tensor | Fp8:
    """Matrices [N_i, K] on top of each other. FP8 if all are and only the last ends inside of a block; else `dtype`."""
    if len(parts) == 1:
        return parts[0]
    quantised = [part for part in parts if isinstance(part, Fp8)]
    if len(quantised) == len(parts) and not any(part.data.shape[0] % BLOCK for part in quantised[:-1]):
        return Fp8(torch.cat([part.data for part in quantised]), torch.cat([part.scales for part in quantised]))
    return torch.cat([dequant_blocks(*part, dtype, 0, 0) if isinstance(part, Fp8) else part for part in parts])


def _tensors(matrix: Tensor | Fp8) -> Sequence[Tensor]:
    return matrix if isinstance(matrix, Fp8) else (matrix,)


def _map(function: Callable[[Tensor], Tensor], matrix: Tensor | Fp8) -> Tensor | Fp8:
    return Fp8(*map(function, matrix)) if isinstance(matrix, Fp8) else function(matrix)


def _take(stored: Any, rows: Slice | None, cols: Slice | None) -> Tensor:
    if cols is not None:
        return stored[slice(*(rows or (None, None))), slice(*cols)]
    return stored[slice(*(rows or (None, None)))]
