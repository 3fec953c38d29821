"""The request state machine against random orders of events, and its corner cases one by one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.config import Timeouts
from millrace_router.flow.flow import (
    LEGAL,
    MAX_REFUSALS,
    AbortSubRequest,
    Action,
    Blame,
    Flow,
    Mismatch,
    Retry,
    Stage,
    Stale,
    SubRequest,
)  # fmt: skip
from millrace_rpc.errors import TABLE, MillraceError
from millrace_testing.examples import examples

BOTH = frozenset(SubRequest)
ERROR, LENGTH, STOP = (
    common_pb2.FINISH_REASON_ERROR,
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_STOP,
)


def flow(max_tokens: int = 6, max_attempts: int = 3, deadline: float | None = None) -> Flow:
    return Flow(Timeouts(), max_tokens, max_attempts, deadline, progress=0.0, queue_s=60.0)


def out(first: int, *tokens: int, finish: int = 0) -> worker_pb2.SequenceOutput:
    logprobs = [{"sampled": {"token_id": token, "logprob": -1.0}} for token in tokens]
    return worker_pb2.SequenceOutput(first_index=first, token_ids=tokens, logprobs=logprobs, finish_reason=finish)


def failed(reason: Reason, retry_after_ms: int = 0) -> worker_pb2.SequenceOutput:
    failure = common_pb2.Failure(reason=reason, message="why", retry_after_ms=retry_after_ms)
    return worker_pb2.SequenceOutput(finish_reason=ERROR, failure=failure)


class Simulation:
    """A world around one flow: sub-requests that say the truth in order, fail or stall; a client that reads when it
    likes.
    """

    def __init__(self, choices: random.Random, max_tokens: int) -> None:
        self.choices = choices
        self.truth = [choices.randrange(100) for _ in range(max_tokens)]
        self.flow = flow(max_tokens, max_attempts=4)
        self.now = 0.0
        # submitted and neither ended nor aborted: next position to say
        self.subs: dict[tuple[int, SubRequest], int] = {}
        self.submitted: list[tuple[int, SubRequest]] = []
        self.closed: set[tuple[int, SubRequest]] = set()
        # attempts whose prefill sub-request has spoken and whose decode sub-request has not read yet
        self.held: set[int] = set()
        self.client: list[int] = []
        self.history = [Stage.QUEUED]

    def apply(self, actions: object) -> None:
        for action in actions:
            match action:
                case AbortSubRequest(SubRequest.PREFILL, attempt, _) if attempt in self.held:
                    self.held.remove(attempt)
                case AbortSubRequest(sub, attempt, _):
                    assert (attempt, sub) in self.subs, "aborted what was not open"
                    self.close(attempt, sub)
                case Retry():
                    assert self.flow.stage is Stage.QUEUED
        if self.flow.stage is not self.history[-1]:
            self.history.append(self.flow.stage)

    def close(self, attempt: int, sub: SubRequest) -> None:
        del self.subs[attempt, sub]
        self.closed.add((attempt, sub))

    def step(self) -> None:
        self.now += 0.01
        event = self.choices.choice(
            ["assign", "speak", "speak", "speak", "fail", "lose", "tick", "stall", "take", "stale"]
        )
        getattr(self, event)()

    def assign(self) -> None:
        if self.flow.stage is Stage.QUEUED:
            subs = (
                frozenset({SubRequest.PREFILL})
                if self.flow.remaining == 1
                else self.choices.choice([BOTH, {SubRequest.DECODE}])
            )
            self.flow.assign(frozenset(subs), self.now)
            self.apply(())
            for sub in self.flow.open:
                key = self.flow.attempt, sub
                assert key not in self.submitted
                self.submitted.append(key)
                self.subs[key] = len(self.flow.outputs)

    def speak(self) -> None:
        if not self.subs:
            return
        (attempt, sub), at = self.choices.choice(sorted(self.subs.items()))
        count = 1 if sub is SubRequest.PREFILL else self.choices.randint(1, 3)
        tokens = self.truth[at : at + count]
        last = at + len(tokens) == len(self.truth)
        if sub is SubRequest.DECODE:
            self.held.discard(attempt)
        elif not last and self.subs.get((attempt, SubRequest.DECODE)) == at:
            self.held.add(attempt)
        if last or sub is SubRequest.PREFILL:
            self.close(attempt, sub)
        else:
            self.subs[attempt, sub] = at + len(tokens)
        self.apply(self.flow.output(sub, out(at, *tokens, finish=LENGTH if last else 0), self.now))

    def fail(self) -> None:
        if self.subs and self.choices.random() < 0.4:
            attempt, sub = self.choices.choice(sorted(self.subs))
            self.close(attempt, sub)
            reason = self.choices.choice([Reason.KV_EXPIRED, Reason.DRAINING, Reason.OVERLOADED, Reason.INTERNAL])
            self.apply(self.flow.output(sub, failed(reason), self.now))

    def lose(self) -> None:
        if self.subs and self.choices.random() < 0.4:
            attempt, sub = self.choices.choice(sorted(self.subs))
            self.close(attempt, sub)
            self.apply(self.flow.sub_failed(sub, MillraceError(Reason.WORKER_LOST, "gone"), self.now))

    def tick(self) -> None:
        self.apply(self.flow.tick(self.now, routable=True))

    def stall(self) -> None:
        if self.choices.random() < 0.1:
            self.now += 100.0
            self.apply(self.flow.tick(self.now, routable=True))

    def take(self) -> None:
        tokens, logprobs = self.flow.take()
        assert [entry.sampled.token_id for entry in logprobs] == tokens
        self.client += tokens

    def stale(self) -> None:
        """A sub-request that is not open says something: dropped."""
        for sub in BOTH - self.flow.open:
            before = list(self.flow.outputs), self.flow.stage
            assert self.flow.output(sub, out(0, 77), self.now) == (Stale("output"),)
            assert (self.flow.outputs, self.flow.stage) == before

    def check(self) -> None:
        assert self.client == self.truth[: len(self.client)]
        assert self.flow.outputs == self.truth[: len(self.flow.outputs)]
        assert {sub for _, sub in self.subs} == self.flow.open
        assert all(attempt == self.flow.attempt for attempt, _ in self.subs)
        if self.flow.ended:
            assert not self.subs and not self.held and set(self.submitted) == self.closed
        for before, after in zip(self.history, self.history[1:], strict=False):
            assert after in LEGAL[before]


@examples(60)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(5, 120))
def test_a_flow_in_random_orders_tells_each_token_once(choices: random.Random, max_tokens: int, steps: int) -> None:
    """Tokens exactly once, in order and beside their log-probabilities; one terminal stage. Every submitted sub-request
    ended or was aborted, and so was every prefill sub-request that spoke without being read.
    """
    world = Simulation(choices, max_tokens)
    for _ in range(steps):
        world.step()
        world.check()
    world.apply(world.flow.cancel(MillraceError(Reason.CANCELLED, "enough")))
    world.take()
    world.check()
    assert world.flow.ended
    assert len([stage for stage in world.history if not LEGAL[stage]]) == 1
    if world.flow.stage is Stage.DONE:
        assert world.client == world.truth
    else:
        assert world.flow.error is not None


PREFILL, DECODE = SubRequest.PREFILL, SubRequest.DECODE
Event = frozenset[SubRequest] | tuple[SubRequest, worker_pb2.SequenceOutput | Reason] | str
BUSY, LEAVES, LOST = failed(Reason.OVERLOADED), failed(Reason.DRAINING), Reason.WORKER_LOST
SAID, OTHER = (PREFILL, out(0, 5)), (DECODE, out(0, 6, 7))


def play(machine: Flow, *events: Event) -> list[Action]:
    """A set of sub-requests is an attempt, a reason the loss of a sub-request, a text what the client does. What the
    last one made.
    """
    actions: list[Action] = []
    for event in events:
        if isinstance(event, frozenset):
            machine.assign(event, 0.0)
        elif isinstance(event, str):
            getattr(machine, event)()
        elif isinstance(event[1], Reason):
            actions = [*machine.sub_failed(event[0], MillraceError(event[1], "gone"), 0.0)]
        else:
            actions = [*machine.output(*event, 0.0)]
    return actions


SCENES: dict[str, tuple[tuple[Event, ...], Stage, list[int], list[type]]] = {
    # events: stage, outputs, and the kinds of the last event's actions
    "a prefill worker is lost after the handover": (
        (BOTH, (DECODE, out(0, 5, 6)), (PREFILL, LOST)), Stage.DECODE, [5, 6], [],
    ),
    "its answer goes on": (
        (BOTH, (DECODE, out(0, 5, 6)), (PREFILL, LOST), (DECODE, out(2, 7, finish=STOP))), Stage.DONE, [5, 6, 7], [],
    ),
    "sub-requests disagree before the client saw it": (
        (BOTH, SAID, OTHER), Stage.QUEUED, [], [Mismatch, AbortSubRequest, AbortSubRequest, Blame, Retry],
    ),
    "sub-requests disagree after the client saw it": (
        (BOTH, SAID, "take", OTHER), Stage.FAILED, [5], [Mismatch, AbortSubRequest, AbortSubRequest],
    ),
    "a gap": (
        (frozenset({DECODE}), (DECODE, out(0, 5)), (DECODE, out(2, 9))), Stage.QUEUED, [],
        [Mismatch, AbortSubRequest, Blame, Retry],
    ),
    "a late end contradicts a longer stream": (
        (BOTH, (DECODE, out(0, 5, 6)), (PREFILL, out(0, 5, finish=STOP))), Stage.QUEUED, [],
        [Mismatch, AbortSubRequest, AbortSubRequest, Blame, Retry],
    ),
    "a lost worker had said everything": (
        (BOTH, (DECODE, out(0, 1, 2, 3, 4, 5, 6)), (DECODE, LOST)), Stage.DONE, [1, 2, 3, 4, 5, 6],
        [AbortSubRequest, Blame],
    ),
    "an operator aborts": (
        (BOTH, (DECODE, out(0, finish=common_pb2.FINISH_REASON_ABORT))), Stage.FAILED, [], [AbortSubRequest, Blame],
    ),
    "a repeated token": ((BOTH, (DECODE, out(0, 5, 6)), (DECODE, out(1, 6))), Stage.DECODE, [5, 6], [Stale]),
    "a token and its repetition": (
        (BOTH, (DECODE, out(0, 5, 6)), (DECODE, out(1, 6, 7))), Stage.DECODE, [5, 6, 7], [Stale],
    ),
    "the client leaves in a handover": ((BOTH, SAID, "stop"), Stage.DONE, [5], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_ends_as_written(name: str) -> None:
    events, stage, outputs, kinds = SCENES[name]
    machine = flow()
    actions = play(machine, *events)
    assert (machine.stage, machine.outputs, [type(action) for action in actions]) == (stage, outputs, kinds)


@pytest.mark.parametrize("end", [Stage.DONE, Stage.FAILED, Stage.CANCELLED])
def test_a_terminal_stage_absorbs_everything(end: Stage) -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine._end(end, "test", error=MillraceError(Reason.CANCELLED, "x"))
    assert (*machine.cancel(MillraceError(Reason.INTERNAL, "y")), *machine.stop(), *machine.tick(1e9, True)) == ()
    assert play(machine, (DECODE, LOST)) == [] and play(machine, (DECODE, out(0, 1))) == [Stale("output")]
    assert machine.stage is end and not machine.outputs


@pytest.mark.parametrize("reason", list(Reason))
def test_a_failure_is_retried_and_blamed_by_its_reason(reason: Reason) -> None:
    """Of a transfer's failure either side may be the cause; every other failure is of the worker that tells it."""
    machine = flow()
    actions = play(machine, BOTH, (DECODE, failed(reason)))
    assert AbortSubRequest(PREFILL, 0, str(reason)) in actions
    either = reason.startswith("KV_") or reason in (Reason.EPOCH_CHANGED, Reason.NOT_FINITE, Reason.TRANSFER_FAILED)
    assert Blame(BOTH if either else frozenset({DECODE}), reason) in actions
    retried = any(isinstance(action, Retry) for action in actions)
    assert retried is TABLE[reason].retry_elsewhere
    assert machine.stage is (Stage.QUEUED if retried else Stage.FAILED)


@pytest.mark.parametrize(("told_ms", "after_s"), [(0, None), (1, 0.001), (2_500, 2.5), (90_000, 90.0)])
def test_the_last_failures_retry_after_reaches_the_client(told_ms: int, after_s: float | None) -> None:
    """A worker tells milliseconds. Where it tells nothing, the reason's own advice holds, or a second."""
    for reason in (Reason.OVERLOADED, Reason.WORKER_LOST, Reason.CONTEXT_TOO_LONG):
        machine = flow(max_attempts=1)
        play(machine, BOTH, (DECODE, out(0, 5)), (DECODE, failed(reason, told_ms)))
        advice = TABLE[reason].retry_after_s or (1.0 if TABLE[reason].retry_elsewhere else 0.0)
        assert machine.stage is Stage.FAILED and machine.error is not None
        assert machine.error.retry_after_s == (advice if after_s is None else after_s)


def test_a_retry_that_is_given_up_keeps_its_time() -> None:
    machine = flow()
    play(machine, BOTH, (DECODE, failed(Reason.OVERLOADED, 7_000)), "give_up")
    assert machine.error is not None and machine.error.retry_after_s == 7.0


def test_busy_workers_are_tried_after_a_pause_that_doubles() -> None:
    machine, delays = flow(max_attempts=2), []
    while not machine.ended:
        actions = play(machine, BOTH, (PREFILL, BUSY))
        delays += [action.delay_s for action in actions if isinstance(action, Retry)]
    assert delays[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0] and max(delays) == 1.0
    assert len(delays) == MAX_REFUSALS + 1, "refusals are no attempts, but not for ever"


def test_what_a_worker_had_taken_is_an_attempt() -> None:
    machine = flow(max_attempts=2)
    play(machine, BOTH, (PREFILL, BUSY), BOTH, (PREFILL, BUSY))
    for tries in (1, 2):
        assert not machine.ended
        actions = play(machine, BOTH, (PREFILL, out(len(machine.outputs), 5)), (DECODE, BUSY))
        assert machine.tries == tries and (tries == 2 or Retry(Reason.OVERLOADED, 0.2) in actions)
    assert machine.stage is Stage.FAILED and "attempt 2 of 2" in machine.error.message
    assert not any(isinstance(action, Retry) for action in actions)


def test_what_a_worker_began_waits_longer_than_a_first_token_may() -> None:
    """Under overload the other workers have no room for the streams of one that was lost, until some of theirs end."""
    one, limits = flow(), Timeouts()
    assert limits.prefill > limits.queue and one.expires == 60.0
    one.assign(BOTH, 1.0)
    one.sub_failed(PREFILL, MillraceError(Reason.OVERLOADED, "busy"), 2.0)
    assert one.stage is Stage.QUEUED and one.expires == 2.0 + limits.queue, "no worker took it"
    one.assign(BOTH, 3.0)
    one.output(PREFILL, out(0, 5), 4.0)
    one.sub_failed(DECODE, MillraceError(Reason.WORKER_LOST, "gone"), 5.0)
    assert one.stage is Stage.QUEUED and one.expires == 5.0 + limits.queue
    assert one.tick(5.0 + limits.queue, routable=True) == () and one.expires == 5.0 + limits.prefill
    one.tick(5.0 + limits.prefill, routable=True)
    assert one.stage is Stage.FAILED and one.error is not None and one.error.reason is Reason.WORKER_LOST


def test_what_a_worker_began_ends_early_when_no_worker_is_left() -> None:
    one, limits = flow(), Timeouts()
    one.assign(BOTH, 1.0)
    one.sub_failed(DECODE, MillraceError(Reason.WORKER_LOST, "gone"), 5.0)
    one.tick(5.0 + limits.queue, routable=False)
    assert one.stage is Stage.FAILED


def test_progress_moves_the_stall_limit() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(DECODE, out(0, 5), 10.0)
    machine.output(DECODE, out(1, 6), 20.0)
    assert machine.expires == 20.0 + machine.timeouts.stall


def test_tokens_that_are_taken_back_take_their_logprobs_along() -> None:
    machine = flow()
    play(machine, BOTH, (PREFILL, out(0, 5)), (DECODE, out(0, 6)))
    assert machine.stage is Stage.QUEUED and machine.logprobs == []
    play(machine, BOTH, (DECODE, out(0, 6, 7)))
    tokens, logprobs = machine.take()
    assert tokens == [6, 7] == [entry.sampled.token_id for entry in logprobs]


# ------------------------------------------------------------------------------------- waits at workers


@pytest.mark.parametrize(
    ("subs", "sub", "said"),
    [
        (BOTH, SubRequest.PREFILL, ()),  # in a prefill queue
        (BOTH, SubRequest.DECODE, (SubRequest.PREFILL,)),  # an import that lacks pages
        (BOTH, SubRequest.DECODE, (SubRequest.PREFILL, SubRequest.DECODE)),  # preempted
        (frozenset({SubRequest.DECODE}), SubRequest.DECODE, ()),  # in a unified worker's queue
        (frozenset({SubRequest.DECODE}), SubRequest.DECODE, (SubRequest.DECODE,)),
    ],
)
def test_no_progress_is_due_while_a_worker_says_that_the_request_waits(
    subs: frozenset[SubRequest], sub: SubRequest, said: tuple[SubRequest, ...]
) -> None:
    made = flow(max_tokens=9)
    made.assign(subs, 0.0)
    for index, who in enumerate(said):
        made.output(who, out(0 if who is SubRequest.PREFILL else index, 7), 1.0)
    made.wait(sub, False, 2.0)
    for now in range(10, 2000, 10):
        assert made.tick(float(now), routable=True) == ()
    made.wait(sub, True, 2000.0)
    limit = made.expires - 2000.0
    assert limit in (Timeouts().prefill, Timeouts().handover, Timeouts().stall), "the time begins again"
    assert made.tick(2000.0 + limit - 0.1, routable=True) == ()
    retry = made.tick(2000.0 + limit, routable=True)
    assert any(isinstance(action, Retry) and action.reason is Reason.STALLED for action in retry)


def test_a_wait_elsewhere_excuses_nobody() -> None:
    """A decode worker without pages does not explain why a prompt is not computed. A wait ends with its sub-request."""
    made = flow(max_tokens=9)
    made.assign(BOTH, 0.0)
    made.wait(SubRequest.DECODE, False, 1.0)
    assert made.tick(Timeouts().prefill, routable=True)
    made.assign(BOTH, 200.0)
    made.wait(SubRequest.PREFILL, False, 201.0)
    made.output(SubRequest.PREFILL, out(0, 7), 210.0)
    assert made.stage is Stage.HANDOVER and made.tick(210.0 + Timeouts().handover, routable=True)


def test_a_deadline_passes_also_in_a_wait() -> None:
    made = flow(deadline=50.0)
    made.assign(BOTH, 0.0)
    made.wait(SubRequest.PREFILL, False, 1.0)
    made.tick(50.0, routable=True)
    assert made.stage is Stage.FAILED and made.error is not None and made.error.reason is Reason.DEADLINE_EXCEEDED


def test_pages_that_expired_while_their_reader_waited_are_nobodys_fault() -> None:
    for waited in (True, False):
        made = flow(max_tokens=9)
        made.assign(BOTH, 0.0)
        made.output(SubRequest.PREFILL, out(0, 7), 1.0)
        if waited:
            made.wait(SubRequest.DECODE, False, 2.0)
        actions = made.output(SubRequest.DECODE, failed(Reason.KV_EXPIRED), 300.0)
        assert Blame(frozenset() if waited else BOTH, Reason.KV_EXPIRED) in actions
