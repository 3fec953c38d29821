"""Names a checkpoint, so that only workers with the same weights read each other's KV."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from millrace_serve.model.config import CONFIG_FILE

SAMPLES, SAMPLE_BYTES = 16, 64 << 10  # of each file: 163 MiB of the 163 files of the 671B model
LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian


def checkpoint_hash(path: Path) -> str:
    """Hash of the config, and of each weight file's name, size, header and evenly spaced samples. Neither the folder's
    name nor times count. A change of a few bytes between two samples stays unseen: another training, quantization or
    fine-tune of the model does not.
    """
    digest = hashlib.blake2b((path / CONFIG_FILE).read_bytes(), digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for part in _parts(content, size):
                digest.update(part)
    return digest.hexdigest()


def _parts(content: BinaryIO, size: int) -> Iterator[bytes]:
    """Names, shapes and dtypes of the tensors, then the samples; they cover a small file entirely."""
    length = min(int.from_bytes(content.read(LENGTH_BYTES), "little"), size)  # any number in another kind of file
    yield content.read(length)
    start, last = LENGTH_BYTES + length, size - SAMPLE_BYTES
    for i in range(SAMPLES):
        content.seek(max(start + (last - start) * i // (SAMPLES - 1), start))
        yield content.read(SAMPLE_BYTES)
