"""Reads a public checkpoint directory: each rank reads its slices only, each tensor is checked where it is used.

1. `Checkpoint(dir, config, device, dtype)` reads the headers: name -> file, from `*.safetensors` or the shards' index.
2. The modules of the model take their tensors by public name with the shape that the config implies: `tensor` for
   tensors in the compute dtype, `matrix` and `stack` for the weights of a GEMM, which stay quantised where the
   checkpoint and the device have it.
3. `finish()` refuses a checkpoint that holds weights which the config does not describe.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from millrace_common.model_files import read_object
from millrace_kernels.fp8 import BLOCK, quant_blocks
from millrace_kernels.int8 import Matrix
from torch import Tensor

from millrace_serve.model import quantised
from millrace_serve.model.checkpoint.tensor_file import DTYPES, NotFinite, Stored, TensorFile, TensorReader
from millrace_serve.model.config import ModelConfig

INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("BF16", "F16", "F32")
QUANTISED = tuple({form.dtype: form for form in quantised.FORMS.values()})
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

Shape = tuple[int, ...]
Slice = tuple[int, int]  # half-open


class CheckpointError(ValueError):
    """The checkpoint is unreadable or does not match its config; the message names the tensor."""


class Part(NamedTuple):
    """What this rank holds of a matrix; None stands for all rows or all columns."""

    rows: Slice | None = None
    cols: Slice | None = None

    def of(self, shape: Shape) -> tuple[Slice, Slice]:
        return self.rows or (0, shape[0]), self.cols or (0, shape[1])


WHOLE = Part()


def stays(form: quantised.Form, shape: Shape, part: Part, stacked: int = 1) -> bool:
    """Whether a part can stay in `form`, with so many on top of each other: where scales are by block, its edges are
    those of blocks; but for the last row, unless another part begins there.
    """
    (first, last), cols = part.of(shape)
    edges = (first, *cols, *([last] if stacked > 1 else []))
    return not form.by_block or not any(edge % BLOCK for edge in edges)


class Weights(Protocol):
    """The source of the model's tensors: a `Checkpoint`, or random numbers of the same shapes. `shape` is always that
    of the whole tensor in the checkpoint.
    """

    device: torch.device
    dtype: torch.dtype
    kept: quantised.Kept

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the device, in `dtype` (None: the compute dtype)."""

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Matrix:
        """The weight [N, K] of a GEMM, which may stay quantised."""

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Matrix:
        """[len(names), sum of the rows, K]: the matrices of each entry on top of each other, all of one `shape`."""

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        """A tensor that belongs to the model and that this rank does not read: it must have the right shape, and exist
        unless it is `optional`.
        """


class Checkpoint:
    def __init__(
        self,
        directory: str | Path,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep_quantised: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.config = config
        self.device = device
        self.dtype = dtype
        self._form, self.kept = quantised.form_of(config), quantised.kept_forms(config, keep_quantised)
        self._files: dict[Path, TensorFile] = {}
        self._reader = TensorReader()
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            headers = checkpoint_files(self.directory).items()
            files = {file: (names, self._open(file).tensors) for file, names in headers}
            opened.pop_all()
        self._file_of = {name: file for file, (names, stored) in files.items() for name in names or stored}
        self._unclaimed = set(self._file_of)

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        """Quantised weights are dequantised; a part of them may begin inside of a block."""
        dtype = dtype or self.dtype
        if self._is_int4(name):
            return self._unpacked(name, shape, part).to(dtype)
        stored = self._stored(name, shape)
        if stored.dtype in QUANTISED:
            rows, cols = part.of(shape)
            return quantised.plain(self._quantised(name, stored, shape, part), dtype, rows[0] % BLOCK, cols[0] % BLOCK)
        return self._read(stored, part).to(dtype)

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Matrix:
        """INT4 becomes FP8 where it is kept so and the part is whole blocks, for w13 and w2 alike."""
        if self._is_int4(name):
            weight = self._unpacked(name, shape, part)
            whole = not any(size % BLOCK for size in weight.shape)
            return quant_blocks(weight) if self.kept.experts and whole else weight.to(self.dtype)
        stored = self._stored(name, shape)
        if not self._stays(stored, shape, part):
            return self.tensor(name, shape, part)
        return self._quantised(name, stored, shape, part)

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Matrix:
        if not self._is_int4(names[0][0]) and (at_once := self._stack_at_once(names, shape, part)) is not None:
            return at_once
        out: Matrix | None = None
        for index, entry in enumerate(names):
            one = quantised.stack_rows([self.matrix(name, shape, part) for name in entry], self.dtype)
            if out is None:
                out = quantised.each(lambda x: x.new_empty(len(names), *x.shape), one)
            for target, source in zip(quantised.tensors(out), quantised.tensors(one), strict=True):
                target[index].copy_(source)
        assert out is not None, "nothing to stack"
        return out

    def _stack_at_once(self, names: Sequence[Sequence[str]], shape: Shape, part: Part) -> Matrix | None:
        """The stack, read straight into its place; None where something has to be done to the matrices."""
        stored = [[self._stored(name, shape) for name in entry] for entry in names]
        (rows, cols), dtypes = part.of(shape), {one.dtype for entry in stored for one in entry}
        num_rows, whole = rows[1] - rows[0], cols == (0, shape[1])
        if len(dtypes) > 1 or not whole:
            return None
        form, dtype = self._form, DTYPES[stored[0][0].dtype]
        kept = self._stays(stored[0][0], shape, part, len(names[0]))
        if not kept and dtype != self.dtype:
            return None
        out = torch.empty(len(names), len(names[0]) * num_rows, shape[1], dtype=dtype, device=self.device)
        for target, entry in zip(out, stored, strict=True):
            for index, one in enumerate(entry):
                self._reader.start(one, rows[0], target[index * num_rows : (index + 1) * num_rows])
        self._wait()
        if not kept or form is None:
            return out
        return form.make(out, torch.stack([torch.cat([self._scales(name, shape, part) for name in e]) for e in names]))

    def _stays(self, stored: Stored, shape: Shape, part: Part, stacked: int = 1) -> bool:
        form = self.kept.matrices
        return form is not None and stored.dtype == form.dtype and stays(form, shape, part, stacked)

    def _quantised(self, name: str, stored: Stored, shape: Shape, part: Part) -> quantised.Quantised:
        assert self._form is not None, name
        return self._form.make(self._read(stored, part), self._scales(name, shape, part))

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        if self._is_int4(name):
            self._packed(name, shape)
        elif (name in self._file_of or not optional) and self._stored(name, shape).dtype in QUANTISED:
            self._stored_scales(name, shape)

    def skip(self, prefix: str) -> None:
        """Tensors that the config describes and this process does not need."""
        self._unclaimed = {name for name in self._unclaimed if not name.startswith(prefix)}

    def finish(self) -> None:
        """Raises CheckpointError if the checkpoint has tensors that the config does not describe."""
        left = sorted(name for name in self._unclaimed if not name.endswith(IGNORED_SUFFIXES))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise CheckpointError(f"{self.directory}: tensors that config.json does not describe: {shown}")

    def close(self) -> None:
        self._reader.close()
        for file in self._files.values():
            file.close()

    def _open(self, file: Path) -> TensorFile:
        if file not in self._files:
            try:
                self._files[file] = TensorFile(file)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                named = f", but {INDEX_FILE} names it" if (self.directory / INDEX_FILE).is_file() else ""
                raise CheckpointError(f"{file}: {why}{named}") from None
            except ValueError as error:
                raise CheckpointError(f"{file}: {error}") from None
        return self._files[file]

    def _header(self, name: str, shape: Shape, dtypes: tuple[str, ...]) -> Stored:
        if name not in self._file_of:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing (expected shape {list(shape)})")
        file = self._file_of[name]
        stored = self._open(file).tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{file}: tensor {name} is missing (expected shape {list(shape)})")
        if stored.shape != shape:
            raise CheckpointError(f"{file}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}")
        if stored.dtype not in dtypes:
            wanted = f"tensor {name} has dtype {stored.dtype}, expected one of {', '.join(dtypes)}"
            hint = "; config.json has no quantization_config" if stored.dtype in QUANTISED and not self._form else ""
            raise CheckpointError(f"{file}: {wanted}{hint}")
        self._unclaimed.discard(name)
        return stored

    def _is_int4(self, name: str) -> bool:
        return self.config.int4_experts and ".mlp.experts." in name

    def _packed(self, name: str, shape: Shape) -> tuple[Stored, Stored]:
        """Values and scales of a matrix in INT4. The third tensor repeats its shape."""
        self._header(f"{name}_shape", (2,), ("I32", "I64"))
        values = self._header(f"{name}_packed", (shape[0], shape[1] // 8), ("I32",))
        return values, self._header(f"{name}_scale", (shape[0], shape[1] // quantised.INT4_GROUP), FLOATS)

    def _unpacked(self, name: str, shape: Shape, part: Part) -> Tensor:
        """float32, the rank's part"""
        values, scales = (self._read(stored, Part(rows=part.rows)) for stored in self._packed(name, shape))
        weight = quantised.unpack_int4(values, scales)
        return weight if part.cols is None else weight[:, slice(*part.cols)].contiguous()

    def _stored(self, name: str, shape: Shape) -> Stored:
        own = (self._form.dtype,) if self._form is not None and len(shape) == 2 else ()
        return self._header(name, shape, (*FLOATS, *own))

    def _stored_scales(self, name: str, shape: Shape) -> Stored:
        assert self._form is not None, name
        name += self._form.suffix
        if not self._form.by_block:
            return self._header(name, (shape[0], 1), ("F32", "BF16"))
        return self._header(name, tuple(-(-size // BLOCK) for size in shape), ("F32",))

    def _scales(self, name: str, shape: Shape, part: Part) -> Tensor:
        """float32, of the blocks that the part touches, or of its rows."""
        stored = self._stored_scales(name, shape)
        if self._form is not None and self._form.by_block:
            return self._read(stored, Part(*((start // BLOCK, -(-stop // BLOCK)) for start, stop in part.of(shape))))
        return self._read(stored, Part(rows=part.rows)).flatten().float()

    def _read(self, stored: Stored, part: Part) -> Tensor:
        rows = self._reader.tensor(stored, part.rows, self.device)
        self._wait()
        return rows if part.cols is None else rows[:, slice(*part.cols)].contiguous()

    def _wait(self) -> None:
        try:
            self._reader.wait()
        except (OSError, NotFinite) as error:
            raise CheckpointError(str(error)) from error


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
    found: dict[Path, list[str]] = {}
    try:
        places = read_object(index)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    try:
        for name, file in places["weight_map"].items():
            found.setdefault(directory / file, []).append(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: malformed index: {error}") from None
    return dict(sorted(found.items()))
