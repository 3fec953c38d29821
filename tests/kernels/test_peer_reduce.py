"""Sum over ranks + residual + norm in one kernel: processes with Triton's interpreter, one per rank."""

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Fp8, reference_quant_groups
from millrace_kernels.peer import reduce_norm
from millrace_kernels.peer.reduce_norm import WAYS, ReduceNorm, Ways, ways_for
from millrace_kernels.peer.signals import POLLS_PER_S
from millrace_kernels.testing.tolerances import dequantised, rms_error
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from millrace_testing.tolerances import assert_close
from model.ranks import Job, run_jobs
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs test_gpu_peer_reduce.py runs the kernels")
triton_interpreter.install()
CPU, EPS, MANY = torch.device("cpu"), 1e-6, SMALL_TOKENS + 6
TIES = 5e-3  # rms; an inverse instead of a division may turn a tie, to the neighbouring E4M3 value
# rows, FP8 form, plain form, sums of all rows; a program has more than one row of MANY
CALLS = [
    (1, True, False, False), (5, False, True, True), (0, True, True, False), (MANY, True, True, True),
    (MANY, True, False, False), (MANY - 1, False, True, False),
]  # fmt: skip


def inputs(num: int, width: int, size: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Parts of the ranks with zeros of both signs among them, residual (at times all zeros), weight."""
    rng = torch.Generator().manual_seed(seed)
    *parts, residual = (torch.randn(num, width, generator=rng).bfloat16() for _ in range(size + 1))
    for rank, part in enumerate(parts):
        part[rank::3] = 0.0
        part[:, ::5] = -0.0
    if seed % 4 == 1:
        residual.zero_()
    return parts, residual, torch.randn(width, generator=rng).bfloat16()


def reduce_rows(dims: ParallelDims, width: int, ways: Ways) -> list[Any]:
    assert dims.tp_group is not None
    setattr(reduce_norm, "sms", lambda: 7)  # noqa: B010
    reduce = ReduceNorm(dims.tp_group, width, CPU, ways)
    results: list[Any] = []
    for seed, (num, quant, plain, whole) in enumerate(CALLS):
        parts, residual, weight = inputs(num, width, dims.tp, seed)
        if (seed + dims.rank) % 3 == 0:
            time.sleep(0.05)
        added = residual if residual.any() else None
        operand, total = reduce(parts[dims.rank], added, weight, EPS, quant=quant, plain=plain, whole=whole)
        results.append((operand.plain, operand.fp8 and tuple(operand.fp8), total))
    return [results, reduce.error.item()]


def silent_peer(dims: ParallelDims, width: int, ways: Ways) -> int:
    """Rank 1 does not come to the second call."""
    assert dims.tp_group is not None
    reduce = ReduceNorm(dims.tp_group, width, CPU, ways)
    reduce.answer_within(300 / POLLS_PER_S)
    parts, residual, weight = inputs(4, width, 2, 0)
    for _ in range(1 if dims.rank == 1 else 2):
        reduce(parts[dims.rank], residual, weight, EPS, quant=True, plain=True)
    return int(reduce.error.item())


ONE, TWO, BOTH = Ways(MANY, MANY), Ways(0, MANY), Ways(4, MANY)
JOBS = {
    "one 2": (2, 256, ONE),
    "both 3": (3, 200, BOTH),
    "two 2": (2, 384, TWO),  # a rank without a row
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    jobs: dict[str, Job] = {name: (size, 1, reduce_rows, (width, ways)) for name, (size, width, ways) in JOBS.items()}
    jobs |= {"silent one": (2, 1, silent_peer, (256, ONE)), "silent two": (2, 1, silent_peer, (256, TWO))}
    return dict(zip(jobs, run_jobs(list(jobs.values()), tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_results(name: str, results: dict[str, list[Any]]) -> None:
    size, width, ways = JOBS[name]
    for rank, (found, error) in enumerate(results[name]):
        assert error == 0
        for seed, (num, quant, plain, whole) in enumerate(CALLS):
            parts, residual, weight = inputs(num, width, size, seed)
            expected = (sum(part.float() for part in parts) + residual.float()).bfloat16()
            out, fp8, total = found[seed]
            owned = slice(None) if whole or num <= ways.one_shot else slice(rank, None, size)
            assert torch.equal(total[owned], expected[owned])
            assert (out is not None, fp8 is not None) == (plain or num <= SMALL_TOKENS, quant and num > SMALL_TOKENS)
            normed = F.rms_norm(expected, (width,), weight, EPS)
            if out is not None:
                assert_close(out, normed)
            if fp8 is not None:
                assert rms_error(dequantised(Fp8(*fp8)), dequantised(reference_quant_groups(normed))) < TIES


@pytest.mark.parametrize("name", JOBS)
def test_all_ranks_get_the_same_bits(name: str, results: dict[str, list[Any]]) -> None:
    (first, _), *others = results[name]
    for found, _ in others:
        for (out, fp8, total), (out_too, fp8_too, total_too), call in zip(first, found, CALLS, strict=True):
            assert out is None or torch.equal(out.view(torch.int16), out_too.view(torch.int16))
            if fp8 is not None:
                assert torch.equal(fp8[0].view(torch.uint8), fp8_too[0].view(torch.uint8))
                assert torch.equal(fp8[1], fp8_too[1])
            if call[3]:
                assert torch.equal(total.view(torch.int16), total_too.view(torch.int16))


def test_short_steps_need_less_memory() -> None:
    assert ways_for(2, 100) == Ways(100, 100) and ways_for(3, 1 << 20) == WAYS[4] and ways_for(16, 300)[1] == 300


@pytest.mark.parametrize("name", ["silent one", "silent two"])
def test_peer_that_does_not_come_is_in_the_error_word(name: str, results: dict[str, list[Any]]) -> None:
    assert results[name][0] == 2


def test_no_warp_clears_a_slot_before_all_have_read_it() -> None:
    """Every warp has its own copy of the few scales of a row, in FP8 and up to 4,096 columns. One that polled later
    than the one that clears them waited for ever.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "kernels.peer_ptx"]
    kernels = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    assert len(kernels) == 6
    for name, ptx in kernels.items():
        events = re.findall(r"ld\.volatile|bar\.sync|st\.global", ptx)
        polls = [index for index, event in enumerate(events) if event == "ld.volatile"]
        assert polls, name
        assert "st.global" not in {events[index + 1] for index in polls}, name
