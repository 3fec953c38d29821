"""A NaN or an infinite number in any float of a checkpoint is found while it is read, and named."""

import re
import shutil
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_serve.model.checkpoint.tensor_file import DTYPES, Stored, TensorFile, all_finite
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import CheckpointError
from millrace_testing.int4 import write_int4
from millrace_testing.paths import TINY

CPU = torch.device("cpu")
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]
COPIES = ("4.embed_tokens.weight", "shared_head.head.weight")  # of the model's own, which are not read again
BAD = {"BF16": (b"\xc0\x7f", b"\x80\xff"), "F32": (b"\0\0\xc0\x7f", b"\0\0\x80\x7f"), "F8_E4M3": (b"\x7f", b"\xff")}


def written(form: str, folder: Path) -> Path:
    """The trained checkpoint in that form."""
    if not form:
        return Path(shutil.copytree(TINY, folder))
    if form == "int4":
        return write_int4(folder, TINY)
    export(TINY, folder, form)
    return folder


def of_each_kind(folder: Path, form: str) -> list[Stored]:
    """One float tensor of each name but for its numbers, of the highest layer and expert: all of the plain form, of
    another one those that it changes.
    """
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, stored in TensorFile(file).tensors.items():
            same = form and stored.dtype == "BF16" and "scale" not in name
            if DTYPES[stored.dtype].is_floating_point and not (same or name.endswith(COPIES)):
                found[re.sub(r"\d+", "*", name)] = stored
    return list(found.values())


@pytest.mark.parametrize("form", ["", "fp8", "int8", "int4"])
def test_each_kind_of_tensor(form: str, tmp_path: Path) -> None:
    """Scales of INT8 blocks are stored and read as those of FP8."""
    folder = written(form, tmp_path / "model")
    kinds = of_each_kind(folder, form)
    scales = sum("scale" in stored.name for stored in kinds)
    assert (scales > 5 or form in ("", "int4")) and (scales if form else len(kinds) > 15)
    for number, stored in enumerate(kinds):
        quantised, bad = number % 2 == 0, BAD[stored.dtype][number // 2 % 2]
        width = DTYPES[stored.dtype].itemsize
        last = stored.offset + (prod(stored.shape) - 1) * width
        with stored.file.path.open("r+b") as file:
            file.seek(last)
            good = file.read(width)
            file.seek(last)
            file.write(bad)
        with pytest.raises(CheckpointError) as caught:
            load_model(folder, ParallelDims(), CPU, torch.float32, keep_quantised=quantised)
        said = f"{stored.file.path}: tensor {stored.name} has a NaN or an infinite number"
        assert str(caught.value) == said
        with stored.file.path.open("r+b") as file:
            file.seek(last)
            file.write(good)
    load_model(folder, ParallelDims(), CPU, torch.float32, keep_quantised=quantised)


@given(
    dtype=st.sampled_from(FLOATS),
    numbers=st.lists(st.floats(-400, 400), max_size=40),
    bad=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
    place=st.integers(0, 39),
)
def test_like_isfinite(dtype: torch.dtype, numbers: list[float], bad: float | None, place: int) -> None:
    if bad is not None:
        numbers[place:place] = [bad]
    tensor = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    assert all_finite(tensor) is bool(torch.isfinite(tensor.float()).all())


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.itemsize == 1])
def test_every_pattern_of_bits(dtype: torch.dtype) -> None:
    for number in torch.arange(256).to(torch.uint8).view(dtype).split(1):
        assert all_finite(number) is bool(torch.isfinite(number.float()))
