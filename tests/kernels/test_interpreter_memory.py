"""Values that another process writes while the interpreter loads them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU no kernel is interpreted"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU does not write a value while it reads it"),
]
FULL, SECONDS, WIDTH = 0x3F47, 1.0, 32
WRITER = """
import mmap, sys
import numpy as np
with open(sys.argv[1], "r+b") as file:
    memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int16)
    print("ready", flush=True)
    while True:
        memory.fill(int(sys.argv[2]))
        memory.fill(0)
"""


@triton.jit
def copy(source, target, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(target + at, tl.load(source + at))


def test_a_value_that_is_written_meanwhile_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(2 * WIDTH))
    with path.open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int16)
    here, seen = torch.zeros_like(memory), set[int]()
    command = [sys.executable, "-c", WRITER, str(path), str(FULL)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                copy[1,](memory, here, WIDTH)
                seen.update(here.tolist())
        finally:
            writer.kill()
    assert seen == {0, FULL}
