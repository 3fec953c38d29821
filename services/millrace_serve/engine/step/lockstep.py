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
from operator import add

from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.engine.step.runner import Runner

# Of a replica in a step: decode sequences, sampling chunks, tokens of all chunks, whether it wants to end.
State = tuple[int, int, int, int]
AllGather = Callable[[State], list[State]]  # own vector -> those of all replicas, in rank order
Broadcast = Callable[[bytes | None], bytes]  # the leader passes data, the others None; all get the leader's data


@dataclass(frozen=True, slots=True)
class Agreement:
    """The work of all replicas in this step, in rank order."""

    num_decode: tuple[int, ...]  # sequences
    num_sampled: tuple[int, ...]  # sequences that sample
    chunk_tokens: tuple[int, ...]
    last: bool  # of all steps

    @property
    def anybody_works(self) -> bool:
        return any(self.num_decode) or any(self.chunk_tokens)

    @property
    def most_sampled(self) -> int:
        return max(self.num_sampled)

    def tell(self, batch: HostBatch) -> None:
        """Write into a replica's batch what it needs to know of the others."""
        batch.all_decode = not any(self.chunk_tokens)
        if len(self.num_decode) > 1:
            works = zip(self.num_decode, self.chunk_tokens, strict=True)
            batch.dp_num_tokens = tuple([count * batch.num_queries + tokens for count, tokens in works])
            batch.dp_num_sampled = self.num_sampled


@dataclass(frozen=True, slots=True)
class Lockstep:
    """engine/step/groups.py makes it over torch.distributed."""

    all_gather: AllGather | None = None  # among the leaders of replicas; None when dp == 1
    broadcast: Broadcast | None = None  # from the leader of this replica; None when tp == 1

    def agree(self, plan: Plan | None, last: bool) -> Agreement:
        """Once per step on every replica; None: no work here. `last`: this replica wants to end."""
        mine = (*((0, 0, 0) if plan is None else _work(plan)), int(last))
        states = [mine] if self.all_gather is None else self.all_gather(mine)
        decode, chunks, tokens, ends = zip(*states, strict=True)
        return Agreement(decode, tuple(map(add, decode, chunks)), tokens, any(ends))

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


def _work(plan: Plan) -> tuple[int, int, int]:
    """Decode sequences, chunks that sample, and tokens of all chunks."""
    sampling = sum(chunk.samples for chunk in plan.chunks)
    return len(plan.decode), sampling, sum(chunk.end - chunk.start for chunk in plan.chunks)
