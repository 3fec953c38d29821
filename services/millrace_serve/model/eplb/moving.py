"""Experts move between ranks while the model serves.

    every step                    the gates count the choices of each expert (Gate.loads)
    step INTERVAL, 2 INTERVAL, …  the counts are added up over the ranks; a thread makes a placement of them
    PLAN_STEPS later, and on      one layer per step: its experts travel and are copied over the old ones, and its
                                  tables change

No vote is needed: all ranks take the same steps, and make the same placement from the same counts. All of it lies
between two steps in the order of the stream, so a step sees a layer before its move or after it. Weights and tables
keep their addresses, so graphs go on.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from millrace_serve.model.eplb.balance import imbalance, rebalance
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.experts.held import HeldExperts
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import tensors

log = logging.getLogger(__name__)

INTERVAL = 256  # steps: some ten seconds of decode steps, some minutes of the largest prefill steps
PLAN_STEPS = 8  # a plan takes 0.1 s; a rank that is not done by then holds the others up
LEAST_CHOICES = 100  # of an expert, on average: fewer differ by chance, and the counts go on

Move = tuple[int, int]  # place (rank * slots + slot) before, place after


class BalanceReport(NamedTuple):
    """The fields of engine.core.Load."""

    expert_imbalance: tuple[float, ...] = ()
    expert_moves: int = 0
    experts_moved_at: float = 0.0


class Balancer:
    """Used only by the thread that launches steps."""

    def __init__(self, dims: ParallelDims, placement: ExpertPlacement, layers: Mapping[int, Moe]) -> None:
        self.report = BalanceReport()
        self._dims, self._first, self._placement = dims, placement, placement
        self._layers = {layer: moe.routed.held for layer, moe in layers.items()}
        device = next(iter(self._layers.values())).slots.places.device
        self._loads = torch.zeros(len(placement.experts), placement.num_experts, dtype=torch.int32, device=device)
        for layer, moe in layers.items():
            moe.gate.loads = self._loads[layer]
        self._num_steps = 0
        self._planner = ThreadPoolExecutor(1, "balance")
        self._plan: Future[ExpertPlacement] | None = None

    @property
    def staging_bytes(self) -> int:
        """The most memory that a move needs between two steps: all slots of a layer."""
        return max(sum(part.nbytes for part in _parts(held)) for held in self._layers.values())

    def connect(self) -> None:
        """Collective. The first transfer between two ranks makes their connection, which takes a second."""
        self._total_loads()
        slots, size = self._placement.experts.shape[2], self._dims.world
        for distance in range(1, size):
            moves = [(rank * slots, (rank + distance) % size * slots) for rank in range(size)]
            self._transfer(next(iter(self._layers.values())), moves)

    def restart(self) -> None:
        """Experts are back where they began, with other weights."""
        self._placement, self._plan = self._first, None
        self.begin()

    def begin(self) -> None:
        """Forgets what warm-ups have chosen."""
        self._loads.zero_()

    def before_step(self) -> None:
        """To be called before every step, on every rank."""
        self._num_steps += 1
        since = self._num_steps % INTERVAL
        if since == 0 and not self.moving:
            self.plan()
        elif since >= PLAN_STEPS and self.moving:
            self.move()

    @property
    def moving(self) -> bool:
        return self._plan is not None

    def plan(self) -> None:
        """Begins a placement for the counts so far, if they are enough. Collective."""
        loads = self._total_loads()
        if loads.sum() < LEAST_CHOICES * self._placement.num_experts * len(self._layers):
            return
        self._loads.zero_()
        ratios = imbalance(loads, self._placement)[list(self._layers)]
        self.report = self.report._replace(expert_imbalance=tuple(ratios.tolist()))
        self._plan = self._planner.submit(rebalance, loads, self._placement)

    def move(self) -> None:
        """Moves the experts of the next layer whose placement changes; without one the plan is done. Collective."""
        assert self._plan is not None, "nothing is planned"
        wanted, now = self._plan.result().experts, self._placement.experts
        (changed,) = (wanted != now).any(axis=(1, 2)).nonzero()
        if not len(changed):
            self._plan = None
            return
        layer = int(changed[0])
        experts = now.copy()
        experts[layer] = wanted[layer]
        self._placement = dataclasses.replace(self._placement, experts=experts)
        moves, held = moves_between(now[layer], wanted[layer]), self._layers[layer]
        for slot, parts in self._transfer(held, moves):
            for target, part in zip(_parts(held), parts, strict=True):
                target[slot].copy_(part)
        held.slots.update(self._placement)
        num_moves = self.report.expert_moves + len(moves)
        self.report = self.report._replace(expert_moves=num_moves, experts_moved_at=time.time())
        log.debug("experts moved layer=%d moves=%d", layer, len(moves))

    def _total_loads(self) -> np.ndarray:
        """int64 [L, E], over all replicas. Waits for the device."""
        loads = self._loads.long()
        dist.all_reduce(loads, group=self._dims.world_group)
        return loads.cpu().numpy() // self._dims.tp  # ranks of a replica have counted the same

    def _transfer(self, held: HeldExperts, moves: Sequence[Move]) -> list[tuple[int, list[Tensor]]]:
        """The slots of this rank that get an expert, and its parts in memory of their own. Collective."""
        rank, slots = self._dims.rank, self._placement.experts.shape[2]
        arrived, ops = [], []
        for tag, (source, target) in enumerate(moves):
            (sender, old), (receiver, new) = divmod(source, slots), divmod(target, slots)
            parts = [part[old] for part in _parts(held)] if sender == rank else []
            if receiver == rank:
                copies = [part[new].clone() for part in _parts(held)] if not parts else [part.clone() for part in parts]
                arrived.append((new, copies))
                ops += [] if parts else [self._op(dist.irecv, part, sender, tag) for part in copies]
            else:
                ops += [self._op(dist.isend, part, receiver, tag) for part in parts]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return arrived

    def _op(self, kind: Callable[..., object], part: Tensor, peer: int, tag: int) -> dist.P2POp:
        return dist.P2POp(kind, part.view(torch.uint8), peer, self._dims.world_group, tag)


def moves_between(before: np.ndarray, after: np.ndarray) -> list[Move]:
    """The moves that make `after` of `before`, both int32 [R, S]. Experts come from their own rank where it has them,
    else from the replicas in turns.
    """
    old, slots = before.ravel(), before.shape[1]
    moves = []
    for target in (before != after).ravel().nonzero()[0].tolist():
        (sources,) = (old == after.flat[target]).nonzero()
        own = sources[sources // slots == target // slots]
        moves.append((int(own[0] if len(own) else sources[target % len(sources)]), target))
    return moves


def _parts(held: HeldExperts) -> list[Tensor]:
    """The tensors [S, ...] of the layer's slots, without the shared expert."""
    slots = held.num_slots
    return [part[:slots] for matrix in (held.w13, held.w2) for part in tensors(matrix)]
