"""Peer memory and its flags: processes with Triton's interpreter, one per rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from millrace_kernels.peer.memory import ALIGN, PeerMemory
from millrace_kernels.peer.signals import POLLS_PER_S, peer, signal_all, wait_all
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from model.ranks import run_jobs

CPU = torch.device("cpu")
triton_interpreter.install()


@triton.jit
def _send(bases, value, RANK: tl.constexpr, SIZE: tl.constexpr):
    """[SIZE] ints to row RANK of every rank's block, then their flags RANK."""
    for to in tl.static_range(SIZE):
        tl.store(peer(bases, to, 0, tl.int32) + RANK * SIZE + tl.arange(0, SIZE), value + tl.arange(0, SIZE))
    signal_all(bases, 1024 + 4 * RANK, value, SIZE)


@triton.jit
def _receive(bases, error, out, value, spins, RANK: tl.constexpr, SIZE: tl.constexpr):
    flags = peer(bases, RANK, 1024, tl.int32)
    wait_all(flags, value, spins, error, SIZE)
    at = tl.arange(0, SIZE * SIZE)
    tl.store(out + at, tl.load(peer(bases, RANK, 0, tl.int32) + at, cache_modifier=".cg"))


def exchange(dims: ParallelDims) -> list[torch.Tensor]:
    """Steps across the wrap of an int32; after them, one in which rank 1 sends nothing."""
    assert dims.dp_group is not None
    memory, size, results = PeerMemory(dims.dp_group, 2048, CPU), dims.dp, []
    for step in range(6):
        value = (1 << 31) - 3 + step
        value -= (value >= 1 << 31) << 32
        if step == 5 and memory.rank == 1:
            break
        _send[(1,)](memory.bases, value, memory.rank, size)
        out = torch.zeros(size, size, dtype=torch.int32)
        spins = 5 * POLLS_PER_S if step < 5 else 50
        _receive[(1,)](memory.bases, memory.error, out, value, spins, memory.rank, size)
        torch.distributed.barrier(dims.dp_group) if step < 5 else None
        results.append(out)
    results.append(memory.error)
    return results


def parts(dims: ParallelDims) -> Any:
    assert dims.dp_group is not None
    memory = PeerMemory(dims.dp_group, 1000, CPU)
    first, small = memory.take((3, 5), torch.bfloat16)
    second, large = memory.take((2, 96), torch.float32)
    small.fill_(dims.rank + 1)
    torch.distributed.barrier(dims.dp_group)
    with pytest.raises(MemoryError, match="are left"):
        memory.take((129,), torch.uint8)
    offsets = [tensor.data_ptr() - int(memory.bases[memory.rank]) for tensor in (small, large)]
    memory.close()
    return [first, second, *offsets, large.shape, small.float().unique().tolist()]


def test_memory_and_signals(tmp_path: Path) -> None:
    shares, four = run_jobs([(1, 2, parts, ()), (1, 4, exchange, ())], tmp_path)
    for rank, found in enumerate(shares):
        assert found == [0, ALIGN, 0, ALIGN, (2, 96), [rank + 1.0]]
    for rank, (*outs, error) in enumerate(four):
        for step, out in enumerate(outs[:5]):
            value = torch.tensor((1 << 31) - 3 + step).int()
            assert torch.equal(out, (value + torch.arange(4).int()).expand(4, 4)), (rank, step)
        assert error.item() == (0 if rank == 1 else 2)
