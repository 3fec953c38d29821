"""Sum over ranks + residual + norm in one kernel, on two GPUs: results, races, graphs, a peer that is gone."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import quant_groups
from millrace_kernels.peer.reduce_norm import ReduceNorm, Ways
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.testing.tolerances import dequantised, rms_error
from millrace_serve.model.parallel import init_parallel, leave_parallel
from millrace_testing.tolerances import assert_close
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZE, WIDTH, EPS, MOST = 2, 7168, 1e-6, 300
WAYS = {"one": Ways(MOST, MOST), "two": Ways(0, MOST), "both": Ways(8, MOST)}
ROWS = [1, 2, 7, 16, 17, 64, 133, MOST]
TIES = 1.5e-2


class Rows:
    """Parts of all ranks that every rank knows, so each can check its own results."""

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator("cuda").manual_seed(seed)  # equal devices draw equal numbers
        *self.parts, self.residual = (
            torch.randn(MOST, WIDTH, generator=rng, device="cuda").bfloat16() for _ in range(SIZE + 1)
        )
        self.weight = torch.randn(WIDTH, generator=rng, device="cuda").bfloat16()

    def total(self, num: int) -> Tensor:
        summed = torch.zeros(num, WIDTH, device="cuda")
        for part in self.parts:
            summed += part[:num].float()
        return (summed + self.residual[:num].float()).bfloat16()


def reducer(rank: int, ways: str) -> ReduceNorm:
    assert dist.group.WORLD is not None
    return ReduceNorm(dist.group.WORLD, WIDTH, torch.device("cuda", rank), WAYS[ways])


def results(rank: int) -> list[Any]:
    """For every way and number of rows the bits that must be equal on all ranks."""
    rows, bits = Rows(), []
    for ways in WAYS:
        reduce = reducer(rank, ways)
        for num in ROWS:
            mine, residual = rows.parts[rank][:num], rows.residual[:num]
            operand, total = reduce(mine, residual, rows.weight, EPS, quant=True, plain=True, whole=True)
            assert operand.plain is not None and torch.equal(total, rows.total(num)), num
            summed = mine.clone()
            dist.all_reduce(summed)
            assert_close(operand.plain, rms_norm(summed, residual, rows.weight, EPS)[0].plain)
            bits.append([operand.plain.view(torch.int16).cpu(), total.view(torch.int16).cpu()])
            assert (operand.fp8 is not None) == (num > SMALL_TOKENS)
            if operand.fp8 is not None:
                assert rms_error(dequantised(operand.fp8), dequantised(quant_groups(operand.plain))) < TIES
                bits[-1] += [operand.fp8.data.view(torch.uint8).cpu(), operand.fp8.scales.cpu()]
        assert reduce.error.item() == 0
    return bits


def races(rank: int) -> int:
    """Wrong results of 1,000 calls, each behind a delay that other ranks do not have; every tenth is a graph of six."""
    together, alone, rows = random.Random(0), random.Random(rank + 1), Rows()
    reduce = reducer(rank, "both")
    wrong, scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda", dtype=torch.bfloat16)
    expected = rows.total(MOST)

    def call(num: int, quant: bool, delay: int) -> None:
        torch.cuda._sleep(delay)
        # parts and residual times a power of two: the sum is that of the first step, times the power
        mine, residual = rows.parts[rank][:num] * scale, rows.residual[:num] * scale
        operand, total = reduce(mine, residual, rows.weight, EPS, quant=quant, plain=True, whole=True)
        normed = rms_norm(expected[:num] * scale, torch.zeros_like(total), rows.weight, EPS)[0].plain
        assert operand.plain is not None and normed is not None
        far = (operand.plain.float() - normed.float()).abs() > 0.02 * normed.float().abs() + 1e-3
        wrong.add_(far.sum() + (total != expected[:num] * scale).sum())

    def delay() -> int:
        return alone.choice((0, 0, 1_000, 20_000, 200_000))

    graph = torch.cuda.CUDAGraph()
    for num in ROWS:  # nothing may be compiled in a capture
        call(num, True, 0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for num in (1, 17, 1, 133, 7, 16):
            call(num, True, delay())
    for step in range(1000):
        scale.fill_(2.0 ** (step % 5))
        num, quant = together.choice(ROWS), together.random() < 0.5
        graph.replay() if step % 10 == 0 else call(num, quant, delay())
    assert reduce.error.item() == 0
    return int(wrong.item())


def gone(rank: int) -> tuple[int, float]:
    """The error word when rank 1 stays away from the second call, and how long the call took."""
    reduce, rows = reducer(rank, "both"), Rows()

    def call() -> int:
        reduce(rows.parts[rank][:20], rows.residual[:20], rows.weight, EPS, quant=True, plain=True)
        return int(reduce.error.item())

    call()  # the ranks compile it, one longer than the other
    dist.barrier()
    reduce.answer_within(0.03)
    began = time.monotonic()
    found = call() if rank == 0 else int(reduce.error.item())
    taken = time.monotonic() - began
    dist.barrier()
    return found, taken


def _main(rank: int, function: Callable[[int], Any], folder: str) -> None:
    torch.cuda.set_device(rank)
    init_parallel(rank, SIZE, 1, f"file://{folder}/rendezvous", torch.device("cuda", rank), 120.0)
    torch.save(function(rank), Path(folder) / f"{rank}.pt")
    leave_parallel()


def on_ranks(function: Callable[[int], Any], folder: Path) -> list[Any]:
    mp.spawn(_main, (function, str(folder)), nprocs=SIZE)
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


def test_results_are_right_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(results, tmp_path)
    for mine, other in zip(first, second, strict=True):
        assert all(map(torch.equal, mine, other))


def test_delays_change_nothing_in_graphs_and_outside(tmp_path: Path) -> None:
    assert on_ranks(races, tmp_path) == [0, 0]


def test_peer_that_is_gone_is_in_the_error_word(tmp_path: Path) -> None:
    (error, seconds), (nothing, _) = on_ranks(gone, tmp_path)
    assert error == 2 and nothing == 0 and seconds < 30
