"""The life of one continuation: the work of each worker, the outputs for the client, and the retries. Pure: events in,
actions out.

1. QUEUED    waits for workers. After `assign` the attempt goes to its sub-requests at once: a prefill and a decode
             worker, only a prefill worker (one token to go), or a unified one (the decode sub-request alone).
2. PREFILL   no output yet. The first token comes from whichever sub-request is faster.
3. HANDOVER  the prefill worker's token is out, the decode worker is still reading the KV.
4. DECODE    the decode sub-request produces. Its outputs begin with the first token again; what overlaps must be equal.
5. DONE, FAILED, CANCELLED  absorb everything. Every open sub-request has got an abort. In HANDOVER the prefill worker
             has one too: its outputs are complete, but it holds pages for a reader that may never come.

A worker says when a request waits there because others have what it needs. Meanwhile no progress is due of it.

Back to QUEUED: a sub-request failed for a reason that another attempt may cure (by the table of errors) or made no
progress in time. The other sub-request is aborted, the attempt number rises, and the next attempt replays prompt +
`outputs`. Bounds are `max_attempts`, the client's deadline and the budget that all requests share (`give_up`).

`outputs` are the tokens of the room by position. The client takes them with `take`; a disagreement between the
sub-requests is retried only while the client has seen nothing of the attempt, else it ends the request: a wrong token
is never sent knowingly.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_common.transitions import Transitions
from millrace_rpc.errors import MillraceError

from millrace_router.config import Timeouts

BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 1.0  # pauses before trying busy workers again; doubled with every refusal
MAX_REFUSALS = 64  # with these pauses a minute
AGAIN_S = 1.0  # when a client whose request was given up should retry


class Stage(enum.StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    HANDOVER = "handover"
    DECODE = "decode"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class SubRequest(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


_END = {Stage.DONE, Stage.FAILED, Stage.CANCELLED}
LEGAL = {
    Stage.QUEUED: {Stage.PREFILL} | _END,  # DONE: a stop string in what an earlier attempt produced
    Stage.PREFILL: {Stage.HANDOVER, Stage.DECODE, Stage.QUEUED} | _END,
    Stage.HANDOVER: {Stage.DECODE, Stage.QUEUED} | _END,
    Stage.DECODE: {Stage.QUEUED} | _END,
    **{stage: set[Stage]() for stage in _END},
}
_TRANSITIONS = Transitions(LEGAL)


@dataclass(frozen=True, slots=True)
class AbortSubRequest:
    sub: SubRequest
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Blame:
    """The attempt failed because of the worker of this sub-request, or of one of these."""

    subs: frozenset[SubRequest]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Retry:
    """Enter the queue again after `delay_s`. `refused`: the attempt was over before it had begun."""

    reason: Reason
    delay_s: float
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Stale:
    """Count an output that changes nothing: it is "duplicate", or its sub-request is closed ("output")."""

    kind: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Count a disagreement between the sub-requests."""


Action = AbortSubRequest | Blame | Retry | Stale | Mismatch
SubRequests = frozenset[SubRequest]
NOTHING: tuple[Action, ...] = ()


@dataclass(slots=True)
class Flow:
    timeouts: Timeouts
    max_tokens: int
    max_attempts: int
    deadline: float | None  # all times on the event loop's clock
    progress: float  # when the stage began or last moved
    queue_s: float  # how long a wait in the queue may take
    wants_logprobs: bool = True
    stage: Stage = Stage.QUEUED
    attempt: int = -1  # of the latest submit
    refusals: int = 0  # attempts that workers were too busy to take
    open: set[SubRequest] = field(default_factory=set)  # sub-requests that may still send outputs
    waiting: set[SubRequest] = field(default_factory=set)  # those that wait for others, as their worker reports
    outputs: list[int] = field(default_factory=list)  # token ids of the room
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)  # as many as outputs, when asked for
    base: int = 0  # outputs that the latest attempt was given
    taken: int = 0  # outputs that the client has
    finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED  # when DONE
    error: MillraceError | None = None  # of the latest failed attempt; why, when FAILED or CANCELLED
    began: dict[Stage, float] = field(default_factory=dict)  # when each stage began first, also one that took no time

    def __post_init__(self) -> None:
        self.began[self.stage] = self.progress

    @property
    def ended(self) -> bool:
        return self.stage in _TRANSITIONS.final

    @property
    def tries(self) -> int:
        """Attempts that workers took."""
        return self.attempt + 1 - self.refusals

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.outputs)

    @property
    def expires(self) -> float:
        """The time of the next `tick`."""
        limit = {
            Stage.QUEUED: self.queue_s,
            Stage.PREFILL: self.timeouts.prefill,
            Stage.HANDOVER: self.timeouts.handover,
            Stage.DECODE: self.timeouts.stall,
        }[self.stage]
        return self.progress + limit if self.deadline is None else min(self.progress + limit, self.deadline)

    @property
    def waits(self) -> bool:
        """Whether a worker that has to make progress next has said that the request waits there."""
        return not self.waiting.isdisjoint(self.open & self._culprits())

    def take(self) -> tuple[list[int], list[common_pb2.TokenLogprobs]]:
        start, self.taken = self.taken, len(self.outputs)
        return self.outputs[start:], self.logprobs[start:]

    def stop(self) -> Sequence[Action]:
        """A stop string was found in what was taken."""
        return self._end(Stage.DONE, "stop string", finish_reason=common_pb2.FINISH_REASON_STOP)

    def cancel(self, error: MillraceError) -> Sequence[Action]:
        return self._end(Stage.CANCELLED, str(error.reason), error=error)

    def give_up(self) -> Sequence[Action]:
        """Called instead of the requested retry, when the budget is exhausted."""
        assert self.stage is Stage.QUEUED and self.error is not None
        return self._end(Stage.FAILED, "no retry", error=self._final(self.error, "too many requests are tried again"))

    def assign(self, subs: SubRequests, now: float) -> None:
        assert subs and self.stage is Stage.QUEUED
        self.attempt += 1
        self.base = len(self.outputs)
        self.open, self.waiting = set(subs), set()
        self._move(Stage.PREFILL, now)

    def output(self, sub: SubRequest, out: worker_pb2.SequenceOutput, now: float) -> Sequence[Action]:
        """An output of the latest attempt. The common case, the next token of a running decode, must stay short."""
        if sub not in self.open:
            return (Stale("output"),)
        tokens, outputs = out.token_ids, self.outputs
        known = len(outputs) - out.first_index  # how many of its tokens we have (tokens always follow on)
        if tokens:
            if known == 0:
                outputs.extend(tokens)
                if self.wants_logprobs:  # to look at an empty field takes longer than the rest
                    self.logprobs.extend(out.logprobs)
            elif known < 0 or tokens[:known] != outputs[out.first_index : out.first_index + len(tokens)]:
                return self._disagree(sub, out, now)
            else:
                outputs.extend(tokens[known:])
                self.logprobs.extend(out.logprobs[known:])
            self.progress = now
        if sub is SubRequest.DECODE and self.stage is Stage.DECODE and not out.finish_reason:
            return NOTHING if known == 0 else (Stale("duplicate"),)
        return self._turn(sub, out, now)

    def wait(self, sub: SubRequest, over: bool, now: float) -> None:
        """The sub-request's worker says that the request waits there for others, or goes on."""
        if not over:
            self.waiting.add(sub)
        elif sub in self.waiting:
            self.waiting.remove(sub)
            self.progress = now

    def sub_failed(self, sub: SubRequest, error: MillraceError, now: float) -> Sequence[Action]:
        """The sub-request is over without a proper end: its worker refused, failed or went away."""
        if sub not in self.open:
            return NOTHING
        self.open.discard(sub)
        if sub is SubRequest.PREFILL and self.stage is Stage.DECODE:
            return NOTHING  # the decode worker has the whole KV
        if sub in self.waiting and error.reason is Reason.KV_EXPIRED:
            return self._fail(error, frozenset(), now)  # the prompt's pages were held as long as they can be
        return self._fail(error, _BOTH if error.reason in _TWO_SIDED else frozenset({sub}), now)

    def tick(self, now: float, routable: bool) -> Sequence[Action]:
        """Time passed. `routable`: some placement exists, if not now then when capacity returns."""
        if self.ended or now < self.expires:
            return NOTHING
        if self.deadline is not None and now >= self.deadline:
            error = MillraceError(Reason.DEADLINE_EXCEEDED, f"the deadline passed in stage {self.stage}")
            return self._end(Stage.FAILED, "deadline", error=error)
        if self.stage is Stage.QUEUED:
            if routable and self.tries > 0 and now < self.progress + self.timeouts.prefill:
                self.queue_s = self.timeouts.prefill  # a client may have read a part of what a worker began
                return NOTHING
            return self._end(Stage.FAILED, "queue timeout", error=self.error or _no_room(routable))
        if self.waits:
            self.progress = now
            return NOTHING
        error = MillraceError(Reason.STALLED, f"no progress for {now - self.progress:.1f} s in stage {self.stage}")
        return self._fail(error, self._culprits(), now)

    def _turn(self, sub: SubRequest, out: worker_pb2.SequenceOutput, now: float) -> Sequence[Action]:
        """An output that moves the stage or closes the sub-request."""
        finish = out.finish_reason
        if sub is SubRequest.DECODE and out.token_ids and self.stage is not Stage.DECODE:
            if SubRequest.PREFILL in self.open:
                self._move(Stage.HANDOVER, now)  # it took no time, and counts as that
            self._move(Stage.DECODE, now)  # it has the KV
        if finish == common_pb2.FINISH_REASON_ERROR:
            failure = out.failure
            error = MillraceError(failure.reason, failure.message, retry_after_s=failure.retry_after_ms / 1000 or None)
            return self.sub_failed(sub, error, now)
        if finish == common_pb2.FINISH_REASON_ABORT:
            return self.sub_failed(sub, MillraceError(Reason.CANCELLED, f"aborted by the {sub} worker"), now)
        if finish:
            if out.token_ids and out.first_index + len(out.token_ids) != len(self.outputs):
                return self._disagree(sub, out, now)
            self.open.discard(sub)
            return self._end(Stage.DONE, "finished", finish_reason=finish)
        if sub is SubRequest.PREFILL:
            self.open.discard(sub)  # its outputs are complete
            if self.stage is Stage.PREFILL:
                self._move(Stage.HANDOVER, now)
        return NOTHING

    def _disagree(self, sub: SubRequest, out: worker_pb2.SequenceOutput, now: float) -> Sequence[Action]:
        where = f"position {out.first_index} (of {len(self.outputs)})"
        error = MillraceError(Reason.INTERNAL, f"the {sub} worker's tokens at {where} contradict earlier tokens")
        seen = self.taken > self.base
        del self.outputs[max(self.base, self.taken) :], self.logprobs[max(self.base, self.taken) :]
        if seen:
            return (Mismatch(), *self._end(Stage.FAILED, "mismatch", error=error))
        return (Mismatch(), *self._fail(error, _BOTH, now, curable=True))

    def _fail(self, error: MillraceError, blame: SubRequests, now: float, curable: bool = False) -> Sequence[Action]:
        """The attempt is over: start the next one, if it may help and is allowed."""
        self.error = error
        blamed = Blame(blame, error.reason)
        if self.remaining <= 0:
            return (*self._end(Stage.DONE, "complete", finish_reason=common_pb2.FINISH_REASON_LENGTH), blamed)
        if not (curable or error.row.retry_elsewhere):
            return (*self._end(Stage.FAILED, str(error.reason), error=error), blamed)
        busy = error.row.retry_after_s > 0  # the worker is healthy and busy
        pause = min(BACKOFF_S * 2**self.refusals, LONGEST_BACKOFF_S) if busy else 0.0
        refused = busy and len(self.outputs) == self.base and self.refusals < MAX_REFUSALS
        self.refusals += refused
        if self.tries >= self.max_attempts:
            last = self._final(error, f"attempt {self.tries} of {self.max_attempts}")
            return (*self._end(Stage.FAILED, str(error.reason), error=last), blamed)
        aborts = self._abort_open(str(error.reason))
        self._move(Stage.QUEUED, now)
        self.queue_s = self.timeouts.queue
        return (*aborts, blamed, Retry(error.reason, pause, refused))

    def _culprits(self) -> SubRequests:
        """The workers that may cause a silence: a first token needs the prefill worker alone, a handover both."""
        if self.stage is Stage.HANDOVER:
            return _BOTH
        first = self.stage is Stage.PREFILL and SubRequest.PREFILL in self.open
        return frozenset({SubRequest.PREFILL if first else SubRequest.DECODE})

    def _final(self, error: MillraceError, why: str) -> MillraceError:
        """The error for the client, which may retry."""
        return MillraceError(error.reason, f"{error.message} ({why})", retry_after_s=error.retry_after_s or AGAIN_S)

    def _end(
        self,
        stage: Stage,
        why: str,
        *,
        finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED,
        error: MillraceError | None = None,
    ) -> Sequence[Action]:
        if self.ended:
            return NOTHING
        aborts = self._abort_open(why)
        self.finish_reason, self.error = finish_reason, error
        self._move(stage, self.progress)
        return aborts

    def _abort_open(self, why: str) -> tuple[Action, ...]:
        holding = {SubRequest.PREFILL} if self.stage is Stage.HANDOVER else set()
        subs, self.open = sorted(self.open | holding), set()
        return tuple(AbortSubRequest(sub, self.attempt, why) for sub in subs)

    def _move(self, stage: Stage, now: float) -> None:
        self.stage = _TRANSITIONS.move(self.stage, stage, "continuation")
        self.progress = now
        self.began.setdefault(stage, now)


_BOTH = frozenset(SubRequest)
# When the decode worker reports these, the prefill worker may be at fault.
_TWO_SIDED = frozenset(
    {
        Reason.EPOCH_CHANGED,
        Reason.KV_NOT_FOUND,
        Reason.KV_EXPIRED,
        Reason.KV_MISMATCH,
        Reason.NOT_FINITE,
        Reason.TRANSFER_FAILED,
    }
)


def _no_room(routable: bool) -> MillraceError:
    if routable:
        return MillraceError(Reason.OVERLOADED, "no worker had capacity in time")
    return MillraceError(Reason.NO_WORKERS, "no pair of prefill and decode workers is ready")
