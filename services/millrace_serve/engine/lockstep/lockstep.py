"""Common steps of the ranks of a worker.

Data-parallel replicas meet in every step (the experts' exchange is collective), so once per step they agree on a small
vector. A replica without work runs an idle step as long as another one works, and all end with the step in which the
first one asks to end, so that none waits for one that has left. While no replica works they do not meet; the first one
that has work wakes the others. Inside a tensor-parallel group only the leader schedules, and the others run the batches
and the copies that it sends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add

from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.lockstep import packing
from millrace_serve.engine.lockstep.links import RankConnection, framed
from millrace_serve.engine.lockstep.replicas import Replicas, ReplicaState, Said
from millrace_serve.engine.schedule.plan import NOTHING, ContextParallelTurn, Plan, Work
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.engine.step.runner import Runner, StepHandle
from millrace_serve.model.context_parallel.split import Split


@dataclass(frozen=True, slots=True)
class Agreement:
    """The work of all replicas in this step, in rank order."""

    num_decode: tuple[int, ...]  # sequences
    num_sampled: tuple[int, ...]  # sequences that sample
    chunk_tokens: tuple[int, ...]
    last: bool  # of all steps
    split: Split | None = None  # of the step's shared chunk
    turn: ContextParallelTurn | None = None  # in the next step
    limit_s: float = math.inf  # for the next step, of all replicas' decode sequences
    spare_s: float = math.inf  # likewise, before the prompts of this step
    awaited: bool = False  # all replicas commit this step before they schedule the next one
    keys: int = 0  # of the replica with most, as is the next
    pairs: int = 0

    @property
    def anybody_works(self) -> bool:
        return any(self.num_decode) or any(self.chunk_tokens) or self.split is not None

    def widest(self, work: Work) -> Work:
        """`work` of this replica, with the numbers of those that have more: all wait for them. What a shared chunk
        takes tells nothing of others.
        """
        if self.split is not None or not any(work):
            return NOTHING
        return Work(max(self.num_decode), self.keys, max(self.chunk_tokens), self.pairs)

    def tell(self, batch: HostBatch) -> None:
        """Write into a replica's batch what it needs to know of the others."""
        batch.all_decode = not any(self.chunk_tokens) and self.split is None
        if len(self.num_decode) > 1:
            shared = [self.split.num_rows(replica) if self.split else 0 for replica in range(len(self.num_decode))]
            works = zip(self.num_decode, self.chunk_tokens, shared, strict=True)
            batch.dp_num_tokens = tuple([count * batch.num_queries + own + part for count, own, part in works])
            batch.dp_num_sampled = self.num_sampled


class Lockstep:
    """engine/lockstep/join.py makes it of the ranks of a worker. Its methods raise RankLost, which names a rank."""

    def __init__(
        self,
        replicas: Replicas | None = None,
        followers: Sequence[RankConnection] = (),
        leader: RankConnection | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`replicas`: None when dp == 1, and on a follower; `followers`: of a leader; `leader`: of these."""
        self._replicas, self._followers, self._leader, self._close = replicas, followers, leader, close
        self._asleep = True  # in the last step no replica had anything to say
        self.progress = Progress()

    @property
    def fds(self) -> Sequence[int]:
        """To sleep on beside the inbox: one is readable when `due` may have become true."""
        return self._replicas.fds if self._replicas is not None else ()

    def due(self) -> bool:
        """Whether the other replicas wait, or will wait, for this one in the next step."""
        return self._replicas is not None and (not self._asleep or self._replicas.called())

    def agree(self, plan: Plan | None, last: bool) -> Agreement:
        """Once per step on every leader; None: no work here. `last`: this replica wants to end."""
        mine = ReplicaState(last=int(last)) if plan is None else _state(plan, last)
        if self._replicas is None or not (any(mine) or self.due()):
            return _agreement([mine], 0)
        with self.progress.waits():
            states = self._replicas.all_gather(mine, ring=self._asleep)
        self._asleep = not any(map(any, zip(*states, strict=True)))
        return _agreement(states, self._replicas.index)

    def share(self, message: packing.Message) -> None:
        """Give the followers their next batch, or copies."""
        if self._followers:
            data = packing.encode(message)
            with self.progress.waits():
                self._send(data)

    def follow(self, runner: Runner, copy: Callable[[packing.Copies], None]) -> None:
        """The whole life of a follower: run or `copy` what the leader shares until it closes. One step may be ahead."""
        step: StepHandle | None = None
        while data := self._receive():
            message = packing.decode(data)
            if not isinstance(message, packing.Copies):
                step = self._launch(runner, message, step)
                continue
            if message.settled:  # a step that has ended for the leader may still write to these pages here
                self._finish(step)
                step = None
            copy(message)
        self._finish(step)
        self._close()

    def _launch(self, runner: Runner, batch: HostBatch, previous: StepHandle | None) -> StepHandle:
        self.progress.launches(batch)
        step = runner.launch(batch)
        self._finish(previous)
        return step

    def _receive(self) -> bytes:
        assert self._leader is not None, "a leader follows nobody"
        with self.progress.waits():
            return self._leader.receive_message()

    def _finish(self, step: StepHandle | None) -> None:
        if step is not None:
            late = step.done()
            step.result()
            self.progress.finished(late)

    def close(self) -> None:
        """Of a leader, after its last step; its followers end, too."""
        self._send(b"")
        self._close()

    def _send(self, data: bytes | bytearray) -> None:
        message = framed(data)
        for follower in self._followers:
            follower.send(message)


def _state(plan: Plan, last: bool) -> ReplicaState:
    sampling = sum(chunk.samples for chunk in plan.chunks)
    tokens = sum(chunk.end - chunk.start for chunk in plan.chunks if not chunk.shared)
    shared = (plan.shared.start, plan.shared.end) if plan.shared else (0, 0)
    limits = (0, 0) if plan.limit_s == math.inf else (math.ceil(plan.limit_s * 1e6), int(plan.spare_s * 1e6))
    flags = int(last), int(plan.wants_turn)
    work = plan.work.keys, int(plan.work.pairs)
    return ReplicaState(len(plan.decode), sampling, tokens, *flags, *shared, *limits, int(plan.awaited), *work)


def _agreement(states: Sequence[Said], me: int) -> Agreement:
    """Of the replica with index `me`."""
    decode, chunks, tokens, ends, wants, starts, stops, limits, spares, awaited, *most = zip(*states, strict=True)
    split = None
    if any(stops):
        owner = next(index for index, stop in enumerate(stops) if stop)
        split = Split(owner, me, len(states), starts[owner], stops[owner])
    turn = _turn(wants, split, me) if any(wants) else None
    limit_s = min((limit / 1e6 for limit in limits if limit), default=math.inf)
    spare_s = min((spare / 1e6 for limit, spare in zip(limits, spares, strict=True) if limit), default=math.inf)
    sampled = tuple(map(add, decode, chunks))
    return Agreement(decode, sampled, tokens, any(ends), split, turn, limit_s, spare_s, any(awaited), *map(max, most))


def _turn(wants: Sequence[int], split: Split | None, me: int) -> ContextParallelTurn:
    """Of those that want it, the first one behind the owner of this step's shared chunk."""
    count, first = len(wants), 0 if split is None else split.owner + 1
    replica = next(index % count for index in range(first, first + count) if wants[index % count])
    return ContextParallelTurn(replica == me, count)
