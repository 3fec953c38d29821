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


@dataclass(frozen=True, slots=True)
class Lockstep:
    """engine/step/groups.py makes it over torch.distributed."""

    all_gather: AllGather | None = None  # among the leaders of replicas; None when dp == 1
    broadcast: Broadcast | None = None  # from the leader of this replica; None when tp == 1

    def agree(self, batch: HostBatch | None, last: bool) -> Agreement:
        """Once per step on every replica; None: no work here. `last`: this replica wants to end."""
        if self.all_gather is None:
            return Agreement(batch is not None, (), batch is None or batch.is_decode, last)
        mine = (0, 0, 1) if batch is None else (1, batch.num_tokens, int(batch.is_decode))
        works, tokens, decode, ends = zip(*self.all_gather((*mine, int(last))), strict=True)
        return Agreement(any(works), tokens, all(decode), any(ends))

    def share(self, batch: HostBatch | None) -> None:
        """Give the followers their next batch; None: the end."""
        if self.broadcast is not None:
            self.broadcast(pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL))

    def follow(self, runner: Runner) -> None:
        """The whole life of a follower: run what the leader shares until it ends. One step may be ahead."""
        assert self.broadcast is not None, "tp == 1 has no followers"
        previous = None
        while (batch := pickle.loads(self.broadcast(None))) is not None:
            handle = runner.launch(batch)
            if previous is not None:
                previous.result()
            previous = handle
        if previous is not None:
            previous.result()
