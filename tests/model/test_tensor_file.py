"""Tensors read by threads are those that safetensors wrote, and a damaged file is refused before any is read."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.model.checkpoint import tensor_file
from millrace_serve.model.checkpoint.tensor_file import DTYPES, Stored, TensorFile, TensorReader
from safetensors.torch import save_file

CPU = torch.device("cpu")
READER = TensorReader()


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    numbers = {name: torch.randint(-100, 100, (13, 7, 5)).to(dtype) for name, dtype in DTYPES.items()}
    return {**numbers, "row": torch.randn(1, 300), "number": torch.tensor(3.5), "none": torch.empty(0, 4)}


@pytest.fixture(scope="module")
def file(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> TensorFile:
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return TensorFile(path)


def read(stored: Stored, rows: tuple[int, int] | None = None) -> torch.Tensor:
    out = READER.tensor(stored, rows, CPU)
    READER.wait()
    return out


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("block", [8 << 20, 16])
def test_whole_tensors(
    tensors: dict[str, torch.Tensor], file: TensorFile, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block)
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = file.tensors[name]
        assert stored.shape == tuple(tensor.shape) and DTYPES[stored.dtype] == tensor.dtype
        assert equal(read(stored), tensor)


@given(first=st.integers(0, 13), count=st.integers(0, 13), name=st.sampled_from(sorted(DTYPES)))
def test_rows(tensors: dict[str, torch.Tensor], file: TensorFile, first: int, count: int, name: str) -> None:
    last = min(first + count, 13)
    assert equal(read(file.tensors[name], (first, last)), tensors[name][first:last])


def test_many_reads_end_with_one_wait(tensors: dict[str, torch.Tensor], file: TensorFile) -> None:
    reader, out = TensorReader(), torch.zeros(13, 2, 7, 5)
    for row in range(13):
        for half in range(2):
            reader.start(file.tensors["F32"], row, out[row, half].unsqueeze(0))
    reader.wait()
    assert torch.equal(out, tensors["F32"].unsqueeze(1).expand(-1, 2, -1, -1))


class OnAGpu(torch.Tensor):
    """Blocks of it are copied there."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_weights_that_serve_are_read_over(
    tensors: dict[str, torch.Tensor], file: TensorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights are loaded in inference mode, in which a GPU's tensors take no copy of a thread that is not."""
    reader, pinned = TensorReader(), torch.empty(tensor_file.BLOCK_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(reader, "_pinned", SimpleNamespace(block=pinned))
    with torch.inference_mode():
        out = torch.zeros(13, 7, 5).as_subclass(OnAGpu)
        reader.start(file.tensors["F32"], 0, out)
        reader.wait()
    assert out.is_inference() and torch.equal(out.as_subclass(torch.Tensor), tensors["F32"])


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {**ENTRY, "data_offsets": [0, 32]}}, "the file ends before byte"),
        ({"a": {**ENTRY, "shape": [2, 3]}}, "16 bytes are not a tensor of shape"),
        ({"a": {"dtype": "F32"}}, "malformed header"),
        ({"a": 1}, "malformed header"),
        ([], "malformed header"),
    ],
)
def test_damaged_headers(header: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        TensorFile(write(tmp_path / "x.safetensors", header, bytes(16)))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\x05" + bytes(7) + b"nope!"])
def test_other_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=r"empty|cut off|Expecting value"):
        TensorFile(tmp_path / "x")


def test_file_that_is_cut_off_later_ends_the_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": ENTRY}, bytes(16))
    stored = TensorFile(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match="the file ends at byte"):
        read(stored)
