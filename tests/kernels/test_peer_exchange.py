"""Dispatch and combine, in processes with Triton's interpreter: which row is where, and every sum's bits."""

import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from millrace_kernels.fp8 import Operand
from millrace_kernels.peer.exchange import Exchange, ExpertPlaces, Received
from millrace_kernels.peer.signals import POLLS_PER_S
from millrace_kernels.triton.quant import quant_groups
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from model.ranks import run_jobs
from torch import Tensor

CPU = torch.device("cpu")
EXPERTS, TOP_K, MOST_ROWS = 12, 3, 6
triton_interpreter.install()


class Case(NamedTuple):
    dp: int
    tp: int
    dim: int
    dtype: torch.dtype
    quant: bool
    shared: bool
    copies: int


CASES = [
    Case(2, 1, 256, torch.bfloat16, quant=True, shared=True, copies=1),
    Case(2, 2, 200, torch.float32, quant=False, shared=False, copies=2),
    Case(3, 1, 200, torch.bfloat16, quant=False, shared=True, copies=1),
    Case(4, 1, 384, torch.bfloat16, quant=True, shared=False, copies=3),
]
STEPS = [(6, 1, 0, 4), (0, 0, 5, 6), (3, 3, 3, 3), (0, 6, 0, 0)]  # T of the ranks


class Sent(NamedTuple):
    """What a member sends in a step; every process can draw that of every other."""

    x: Tensor
    weights: Tensor
    ids: Tensor

    @classmethod
    def draw(cls, case: Case, step: int, member: int, rows: int) -> "Sent":
        seeded = torch.Generator().manual_seed(100 * step + member)
        x = torch.randn(rows, case.dim, generator=seeded).to(case.dtype)
        ids = torch.stack([torch.randperm(EXPERTS, generator=seeded)[:TOP_K] for _ in range(rows + 1)]).int()[:rows]
        ids[2:3] = -1  # padding
        return cls(x, torch.rand(rows, TOP_K, generator=seeded), ids)


def places_of(case: Case, tp_rank: int) -> ExpertPlaces:
    ranks = case.dp * case.tp
    slots = EXPERTS * case.copies // ranks
    table = torch.randperm(slots * ranks, generator=torch.Generator().manual_seed(1)).view(case.copies, EXPERTS)
    return ExpertPlaces(torch.nn.functional.pad(table, (0, 1), value=-1).int(), slots, case.tp, tp_rank)


def steps(dims: ParallelDims, case: Case) -> list[float]:
    """Seconds of each step; every process checks what it received."""
    assert dims.dp_group is not None
    exchange = Exchange(dims.dp_group, CPU, MOST_ROWS, case.dim, TOP_K + 1, case.dtype)
    exchange.answer_within(0.3)
    places, delays = places_of(case, dims.tp_rank), torch.Generator().manual_seed(dims.rank)
    for step, all_counts in enumerate(STEPS * 2):
        counts = list(all_counts[: case.dp])
        sent = [Sent.draw(case, step, member, rows) for member, rows in enumerate(counts)]
        own = sent[dims.dp_rank]
        time.sleep(0.05 * float(torch.rand((), generator=delays)))
        received = exchange.dispatch(*own, places, counts, shared=case.shared, quant=case.quant)
        _check_received(case, received, sent, places, dims)
        partials = [_partial(case, step, member, sum(counts)) for member in range(case.dp)]
        received.partial.copy_(partials[dims.dp_rank])
        time.sleep(0.05 * float(torch.rand((), generator=delays)))
        out = exchange.combine(own.ids, places, counts, shared=case.shared)
        first = sum(counts[: dims.dp_rank])
        assert torch.equal(out, _sum(case, own.ids, partials, places, first, dims))
    assert exchange.error.item() == 0
    exchange.close()
    return []


def _holders(ids: Tensor, places: ExpertPlaces, first: int) -> Tensor:
    """int64 [T, K]: the place of each choice, -1 for padding."""
    turns = (first + torch.arange(len(ids))) % len(places.table)
    return places.table[turns[:, None], ids.long()].long()


def _check_received(case: Case, received: Received, sent: list[Sent], places: ExpertPlaces, dims: ParallelDims) -> None:
    rank, first = dims.rank, 0
    for member, (x, weights, ids) in enumerate(sent):
        rows, place = slice(first, first + len(x)), _holders(ids, places, first)
        here = (place >= 0) & (place // places.slots == rank)
        expected, gains = torch.where(here, place % places.slots, -1), weights
        if case.shared:
            own = (ids[:, :1] >= 0) & (member == dims.dp_rank)
            expected = torch.cat((expected, torch.where(own, places.slots, -1)), 1)
            gains = torch.nn.functional.pad(weights, (0, 1), value=1.0)
        assert torch.equal(received.slots[rows].long(), expected)
        assert torch.equal(received.weights[rows], gains)
        chosen, first = (expected >= 0).any(1), first + len(x)
        sent = Operand(None, quant_groups(x)) if case.quant else Operand(x, None)
        for found, wanted in zip(_forms(received.rows), _forms(sent), strict=True):
            assert torch.equal(found[rows][chosen].float(), wanted[chosen].float())


def _forms(rows: Operand) -> list[Tensor]:
    return [form for form in (rows.plain, *(rows.fp8 or ())) if form is not None]


def _partial(case: Case, step: int, member: int, total: int) -> Tensor:
    seeded = torch.Generator().manual_seed(1000 + 100 * step + member)
    return torch.randn(total, case.dim, generator=seeded).to(case.dtype)


def _sum(
    case: Case, ids: Tensor, partials: list[Tensor], places: ExpertPlaces, first: int, dims: ParallelDims
) -> Tensor:
    total, place = torch.zeros(len(ids), case.dim), _holders(ids, places, first)
    for member, partial in enumerate(partials):
        chosen = ((place >= 0) & (place // places.slots == member * dims.tp + dims.tp_rank)).any(1)
        chosen |= (ids[:, 0] >= 0) & case.shared & (member == dims.dp_rank)
        total += torch.where(chosen[:, None], partial[first : first + len(ids)].float(), 0.0)
    return total.to(case.dtype)


def lost(dims: ParallelDims) -> tuple[int, int]:
    """Rank 2 stops after the dispatch of the second step: the error word before, and 5 seconds later at most."""
    assert dims.dp_group is not None
    case = CASES[3]._replace(dp=3, copies=1)
    exchange, places = Exchange(dims.dp_group, CPU, MOST_ROWS, case.dim, TOP_K + 1, case.dtype), places_of(case, 0)
    before = 0
    for step, seconds in enumerate((0.3, 0.3, 100 / POLLS_PER_S)):
        if step == 2 and dims.rank == 2:
            break
        exchange.answer_within(seconds)
        own = Sent.draw(case, step, dims.dp_rank, 3)
        exchange.dispatch(*own, places, [3, 3, 3], shared=False, quant=case.quant)
        before = int(exchange.error)
        exchange.combine(own.ids, places, [3, 3, 3], shared=False)
    return before, int(exchange.error)


@pytest.mark.long
def test_steps(tmp_path: Path) -> None:
    run_jobs([(case.tp, case.dp, steps, (case,)) for case in CASES], tmp_path)


@pytest.mark.long
def test_rank_that_is_lost(tmp_path: Path) -> None:
    (results,) = run_jobs([(1, 3, lost, ())], tmp_path)
    assert results == [(3, 3), (3, 3), (0, 0)]
