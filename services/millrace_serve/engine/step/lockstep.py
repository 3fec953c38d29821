"""Common steps of the ranks of a worker.

Data-parallel replicas meet in every step (the experts' exchange is collective), so once per step they agree on a small
CPU vector. A replica without work runs an idle step as long as another one works, and all end with the step in which
the first one asks to end, so that none waits for one that has left. Inside a tensor-parallel group only the leader
schedules, and the others run the batches that it broadcasts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.engine.step.runner import Runner

State = tuple[int, int, int, int]  # of a replica in a step: works, its tokens, has no prompt chunk, wants to end
AllGather = Callable[[State], list[State]]  # own vector -> those of all replicas, in rank order
Broadcast = Callable[[bytes | None], bytes]  # the leader passes data, the others None; all get the leader's data


@dataclass(frozen=True, slots=True)
class Agreement:
    anybody_works: bool
    num_tokens: tuple[int, ...]  # of this step, by replica; empty for a single replica
    all_decode: bool  # no replica has a prompt chunk
    last: bool  # of all steps


class Lockstep(Protocol):
    collective: bool  # whether agree() waits for other replicas

    def agree(self, batch: HostBatch | None, last: bool) -> Agreement:
        """Once per step on every replica; None: no work here. `last`: this replica wants to end."""
        ...

    def share(self, batch: HostBatch | None) -> None:
        """Give the followers their next batch; None: the end."""
        ...


class Alone:
    """One replica of one rank."""

    collective = False

    def agree(self, batch: HostBatch | None, last: bool) -> Agreement:
        return _with_itself(batch, last)

    def share(self, batch: HostBatch | None) -> None:
        pass


class Together:
    """`all_gather` among the replicas' leaders (dp > 1), `broadcast` from this leader to its followers (tp > 1)."""

    def __init__(self, all_gather: AllGather | None, broadcast: Broadcast | None) -> None:
        self._all_gather = all_gather
        self._broadcast = broadcast
        self.collective = all_gather is not None

    def agree(self, batch: HostBatch | None, last: bool) -> Agreement:
        if self._all_gather is None:
            return _with_itself(batch, last)
        mine = (0, 0, 1) if batch is None else (1, batch.num_tokens, int(batch.is_decode))
        works, tokens, decode, ends = zip(*self._all_gather((*mine, int(last))), strict=True)
        return Agreement(any(works), tokens, all(decode), any(ends))

    def share(self, batch: HostBatch | None) -> None:
        if self._broadcast is not None:
            self._broadcast(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))


def _with_itself(batch: HostBatch | None, last: bool) -> Agreement:
    return Agreement(batch is not None, (), batch is None or batch.is_decode, last)


def follow(runner: Runner, broadcast: Broadcast) -> None:
    """The whole life of a follower: run what the leader broadcasts until it ends. One step may be ahead."""
    previous = None
    while (batch := pickle.loads(broadcast(None))) is not None:
        handle = runner.launch(batch)
        if previous is not None:
            previous.result()
        previous = handle
    if previous is not None:
        previous.result()
