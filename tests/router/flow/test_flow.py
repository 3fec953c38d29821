"""The request state machine against random orders of events, and its corner cases one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.config import Timeouts
from millrace_router.flow.flow import LEGAL, MAX_REFUSALS, AbortLeg, Blame, Flow, Leg, Mismatch, Retry, Stage, Stale
from millrace_rpc.errors import TABLE, MillraceError

BOTH = frozenset(Leg)
ERROR, LENGTH, STOP = (
    common_pb2.FINISH_REASON_ERROR,
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_STOP,
)


def flow(max_tokens: int = 6, max_attempts: int = 3, deadline: float | None = None) -> Flow:
    return Flow(Timeouts(), max_tokens, max_attempts, deadline, progress=0.0, queue_s=60.0)


def out(first: int, *tokens: int, finish: int = 0) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(first_index=first, token_ids=tokens, finish_reason=finish)


def failed(reason: Reason) -> worker_pb2.SequenceOutput:
    failure = common_pb2.Failure(reason=reason, message="why")
    return worker_pb2.SequenceOutput(finish_reason=ERROR, failure=failure)


class Simulation:
    """A world around one flow: legs that say the truth in order, fail or stall; a client that reads when it likes."""

    def __init__(self, choices: random.Random, max_tokens: int) -> None:
        self.choices = choices
        self.truth = [choices.randrange(100) for _ in range(max_tokens)]
        self.flow = flow(max_tokens, max_attempts=4)
        self.now = 0.0
        self.legs: dict[tuple[int, Leg], int] = {}  # submitted and neither ended nor aborted: next position to say
        self.submitted: list[tuple[int, Leg]] = []
        self.closed: set[tuple[int, Leg]] = set()
        self.parked: set[int] = set()  # attempts whose prefill leg has spoken and whose decode leg has not read yet
        self.client: list[int] = []
        self.history = [Stage.QUEUED]

    def apply(self, actions: object) -> None:
        for action in actions:
            match action:
                case AbortLeg(Leg.PREFILL, attempt, _) if attempt in self.parked:
                    self.parked.remove(attempt)
                case AbortLeg(leg, attempt, _):
                    assert (attempt, leg) in self.legs, "aborted what was not open"
                    self.close(attempt, leg)
                case Retry():
                    assert self.flow.stage is Stage.QUEUED
        if self.flow.stage is not self.history[-1]:
            self.history.append(self.flow.stage)

    def close(self, attempt: int, leg: Leg) -> None:
        del self.legs[attempt, leg]
        self.closed.add((attempt, leg))

    def step(self) -> None:
        self.now += 0.01
        event = self.choices.choice(
            ["assign", "speak", "speak", "speak", "fail", "lose", "tick", "stall", "take", "stale"]
        )
        getattr(self, event)()

    def assign(self) -> None:
        if self.flow.stage is Stage.QUEUED:
            legs = frozenset({Leg.PREFILL}) if self.flow.remaining == 1 else self.choices.choice([BOTH, {Leg.DECODE}])
            self.flow.assign(frozenset(legs), self.now)
            self.apply(())
            for leg in self.flow.open:
                key = self.flow.attempt, leg
                assert key not in self.submitted
                self.submitted.append(key)
                self.legs[key] = len(self.flow.outputs)

    def speak(self) -> None:
        if not self.legs:
            return
        (attempt, leg), at = self.choices.choice(sorted(self.legs.items()))
        count = 1 if leg is Leg.PREFILL else self.choices.randint(1, 3)
        tokens = self.truth[at : at + count]
        last = at + len(tokens) == len(self.truth)
        if leg is Leg.DECODE:
            self.parked.discard(attempt)
        elif not last and self.legs.get((attempt, Leg.DECODE)) == at:
            self.parked.add(attempt)
        if last or leg is Leg.PREFILL:
            self.close(attempt, leg)
        else:
            self.legs[attempt, leg] = at + len(tokens)
        self.apply(self.flow.output(leg, out(at, *tokens, finish=LENGTH if last else 0), self.now))

    def fail(self) -> None:
        if self.legs and self.choices.random() < 0.4:
            attempt, leg = self.choices.choice(sorted(self.legs))
            self.close(attempt, leg)
            reason = self.choices.choice([Reason.KV_EXPIRED, Reason.DRAINING, Reason.OVERLOADED, Reason.INTERNAL])
            self.apply(self.flow.output(leg, failed(reason), self.now))

    def lose(self) -> None:
        if self.legs and self.choices.random() < 0.4:
            attempt, leg = self.choices.choice(sorted(self.legs))
            self.close(attempt, leg)
            self.apply(self.flow.leg_failed(leg, MillraceError(Reason.WORKER_LOST, "gone"), self.now))

    def tick(self) -> None:
        self.apply(self.flow.tick(self.now, routable=True))

    def stall(self) -> None:
        if self.choices.random() < 0.1:
            self.now += 100.0
            self.apply(self.flow.tick(self.now, routable=True))

    def take(self) -> None:
        tokens, _ = self.flow.take()
        self.client += tokens

    def stale(self) -> None:
        """A leg that is not open says something: dropped."""
        for leg in BOTH - self.flow.open:
            before = list(self.flow.outputs), self.flow.stage
            assert self.flow.output(leg, out(0, 77), self.now) == (Stale("output"),)
            assert (self.flow.outputs, self.flow.stage) == before

    def check(self) -> None:
        assert self.client == self.truth[: len(self.client)]
        assert self.flow.outputs == self.truth[: len(self.flow.outputs)]
        assert {leg for _, leg in self.legs} == self.flow.open
        assert all(attempt == self.flow.attempt for attempt, _ in self.legs)
        if self.flow.ended:
            assert not self.legs and not self.parked and set(self.submitted) == self.closed
        for before, after in zip(self.history, self.history[1:], strict=False):
            assert after in LEGAL[before]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.integers(5, 120))
def test_random_orders(choices: random.Random, max_tokens: int, steps: int) -> None:
    """Tokens exactly once and in order; one terminal stage; every submitted leg ended or was aborted, and so was every
    prefill leg that spoke without being read."""
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


def test_terminal_stages_absorb() -> None:
    for end in (Stage.DONE, Stage.FAILED, Stage.CANCELLED):
        machine = flow()
        machine.assign(BOTH, 0.0)
        machine._end(end, "test", error=MillraceError(Reason.CANCELLED, "x"))
        assert machine.cancel(MillraceError(Reason.INTERNAL, "y")) == ()
        assert machine.stop() == ()
        assert machine.tick(1e9, True) == ()
        assert machine.leg_failed(Leg.DECODE, MillraceError(Reason.WORKER_LOST, "z"), 1.0) == ()
        assert machine.output(Leg.DECODE, out(0, 1), 1.0) == (Stale("output"),)
        assert machine.stage is end and not machine.outputs


@pytest.mark.parametrize("reason", list(Reason))
def test_the_table_decides_about_retries(reason: Reason) -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    actions = machine.output(Leg.DECODE, failed(reason), 1.0)
    assert AbortLeg(Leg.PREFILL, 0, str(reason)) in actions
    retried = any(isinstance(action, Retry) for action in actions)
    assert retried is TABLE[reason].retry_elsewhere
    assert machine.stage is (Stage.QUEUED if retried else Stage.FAILED)


def test_busy_workers_are_tried_after_a_pause_that_doubles() -> None:
    machine, delays = flow(max_attempts=2), []
    while not machine.ended:
        machine.assign(BOTH, 0.0)
        actions = machine.output(Leg.PREFILL, failed(Reason.OVERLOADED), 0.0)
        delays += [action.delay_s for action in actions if isinstance(action, Retry)]
    assert delays[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0] and max(delays) == 1.0
    assert len(delays) == MAX_REFUSALS + 1, "refusals are no attempts, but not for ever"


def test_a_prefill_worker_that_is_lost_after_the_handover_is_not_needed() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(Leg.DECODE, out(0, 5, 6), 0.1)  # it has the KV; the prefill worker's own word was never heard
    assert machine.leg_failed(Leg.PREFILL, MillraceError(Reason.WORKER_LOST, "gone"), 0.2) == ()
    assert machine.stage is Stage.DECODE
    machine.output(Leg.DECODE, out(2, 7, finish=STOP), 0.3)
    assert (machine.stage, machine.outputs) == (Stage.DONE, [5, 6, 7])


def test_what_a_worker_had_taken_is_an_attempt() -> None:
    machine = flow(max_attempts=2)
    for _ in range(2):
        machine.assign(BOTH, 0.0)
        machine.output(Leg.PREFILL, failed(Reason.OVERLOADED), 0.0)
    for _ in range(2):
        assert not machine.ended
        machine.assign(BOTH, 0.0)
        machine.output(Leg.PREFILL, out(len(machine.outputs), 5), 0.0)
        actions = machine.output(Leg.DECODE, failed(Reason.DRAINING), 0.0)
    assert machine.stage is Stage.FAILED and "attempt 2 of 2" in machine.error.message
    assert not any(isinstance(action, Retry) for action in actions)


def test_mismatch_before_the_client_saw_anything_is_retried() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(Leg.PREFILL, out(0, 5), 0.1)
    actions = machine.output(Leg.DECODE, out(0, 6, 7), 0.2)
    assert actions[0] == Mismatch() and isinstance(actions[-1], Retry)
    assert machine.stage is Stage.QUEUED and machine.outputs == []


def test_mismatch_after_the_client_saw_it_fails() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(Leg.PREFILL, out(0, 5), 0.1)
    assert machine.take()[0] == [5]
    machine.output(Leg.DECODE, out(0, 6, 7), 0.2)
    assert machine.stage is Stage.FAILED and machine.error.reason is Reason.INTERNAL
    assert machine.take()[0] == []


def test_a_gap_is_a_mismatch() -> None:
    machine = flow()
    machine.assign(frozenset({Leg.DECODE}), 0.0)
    machine.output(Leg.DECODE, out(0, 5), 0.1)
    assert machine.output(Leg.DECODE, out(2, 9), 0.2)[0] == Mismatch()
    assert machine.outputs == []


def test_late_final_first_token_contradicts_a_longer_stream() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(Leg.DECODE, out(0, 5, 6), 0.1)
    assert machine.output(Leg.PREFILL, out(0, 5, finish=STOP), 0.2)[0] == Mismatch()


def test_a_lost_worker_that_had_said_everything_needs_no_replay() -> None:
    machine = flow(max_tokens=2)
    machine.assign(BOTH, 0.0)
    machine.output(Leg.DECODE, out(0, 5, 6), 0.1)
    machine.leg_failed(Leg.DECODE, MillraceError(Reason.WORKER_LOST, "gone"), 0.2)
    assert machine.stage is Stage.DONE and machine.finish_reason == LENGTH


def test_an_operators_abort_ends_the_request() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    actions = machine.output(Leg.DECODE, out(0, finish=common_pb2.FINISH_REASON_ABORT), 0.1)
    assert actions[0] == AbortLeg(Leg.PREFILL, 0, "CANCELLED")
    assert machine.error.reason is Reason.CANCELLED


def test_deadline_is_before_stage_limits() -> None:
    machine = flow(deadline=5.0)
    assert machine.expires == 5.0
    assert machine.tick(4.9, True) == ()
    machine.tick(5.0, True)
    assert machine.error.reason is Reason.DEADLINE_EXCEEDED


def test_what_a_worker_began_waits_longer_than_a_first_token_may() -> None:
    """Under overload the other workers have no room for the streams of one that was lost, until some of theirs end."""
    one, limits = flow(), Timeouts()
    assert limits.prefill > limits.queue
    assert one.expires == 60.0
    one.assign(BOTH, 1.0)
    one.leg_failed(Leg.PREFILL, MillraceError(Reason.OVERLOADED, "busy"), 2.0)
    assert one.stage is Stage.QUEUED and one.expires == 2.0 + limits.queue, "no worker took it"
    one.assign(BOTH, 3.0)
    one.output(Leg.PREFILL, out(0, 5), 4.0)
    one.leg_failed(Leg.DECODE, MillraceError(Reason.WORKER_LOST, "gone"), 5.0)
    assert one.stage is Stage.QUEUED and one.expires == 5.0 + limits.queue
    assert one.tick(5.0 + limits.queue, routable=True) == () and one.expires == 5.0 + limits.prefill
    one.tick(5.0 + limits.prefill, routable=True)
    assert one.stage is Stage.FAILED and one.error is not None and one.error.reason is Reason.WORKER_LOST


def test_what_a_worker_began_ends_as_a_first_token_does_when_no_worker_is_left() -> None:
    one, limits = flow(), Timeouts()
    one.assign(BOTH, 1.0)
    one.leg_failed(Leg.DECODE, MillraceError(Reason.WORKER_LOST, "gone"), 5.0)
    one.tick(5.0 + limits.queue, routable=False)
    assert one.stage is Stage.FAILED


def test_progress_moves_the_stall_limit() -> None:
    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(Leg.DECODE, out(0, 5), 10.0)
    machine.output(Leg.DECODE, out(1, 6), 20.0)
    assert machine.expires == 20.0 + machine.timeouts.stall


def test_logprobs_stay_beside_their_tokens() -> None:
    def scored(first: int, *tokens: int) -> worker_pb2.SequenceOutput:
        message = out(first, *tokens)
        for token in tokens:
            message.logprobs.add(sampled=common_pb2.TokenLogprob(token_id=token, logprob=-1.0))
        return message

    machine = flow()
    machine.assign(BOTH, 0.0)
    machine.output(Leg.PREFILL, scored(0, 5), 0.1)
    machine.output(Leg.DECODE, scored(0, 5, 6, 7), 0.2)
    tokens, logprobs = machine.take()
    assert tokens == [5, 6, 7] == [entry.sampled.token_id for entry in logprobs]


# ------------------------------------------------------------------------------------- waits at workers


@pytest.mark.parametrize(
    ("legs", "leg", "said"),
    [
        (BOTH, Leg.PREFILL, ()),  # in a prefill queue
        (BOTH, Leg.DECODE, (Leg.PREFILL,)),  # an import that lacks pages
        (BOTH, Leg.DECODE, (Leg.PREFILL, Leg.DECODE)),  # preempted
        (frozenset({Leg.DECODE}), Leg.DECODE, ()),  # in a unified worker's queue
        (frozenset({Leg.DECODE}), Leg.DECODE, (Leg.DECODE,)),
    ],
)
def test_no_progress_is_due_while_a_worker_says_that_the_request_waits(
    legs: frozenset[Leg], leg: Leg, said: tuple[Leg, ...]
) -> None:
    made = flow(max_tokens=9)
    made.assign(legs, 0.0)
    for index, who in enumerate(said):
        made.output(who, out(0 if who is Leg.PREFILL else index, 7), 1.0)
    made.wait(leg, False, 2.0)
    for now in range(10, 2000, 10):
        assert made.tick(float(now), routable=True) == ()
    made.wait(leg, True, 2000.0)
    limit = made.expires - 2000.0
    assert limit in (Timeouts().prefill, Timeouts().handover, Timeouts().stall), "the time begins again"
    assert made.tick(2000.0 + limit - 0.1, routable=True) == ()
    retry = made.tick(2000.0 + limit, routable=True)
    assert any(isinstance(action, Retry) and action.reason is Reason.STALLED for action in retry)


def test_a_wait_elsewhere_excuses_nobody() -> None:
    """A decode worker without pages does not explain why a prompt is not computed. A wait ends with its leg."""
    made = flow(max_tokens=9)
    made.assign(BOTH, 0.0)
    made.wait(Leg.DECODE, False, 1.0)
    assert made.tick(Timeouts().prefill, routable=True)
    made.assign(BOTH, 200.0)
    made.wait(Leg.PREFILL, False, 201.0)
    made.output(Leg.PREFILL, out(0, 7), 210.0)
    assert made.stage is Stage.HANDOVER and made.tick(210.0 + Timeouts().handover, routable=True)


def test_a_deadline_passes_also_in_a_wait() -> None:
    made = flow(deadline=50.0)
    made.assign(BOTH, 0.0)
    made.wait(Leg.PREFILL, False, 1.0)
    made.tick(50.0, routable=True)
    assert made.stage is Stage.FAILED and made.error is not None and made.error.reason is Reason.DEADLINE_EXCEEDED


def test_pages_that_expired_while_their_reader_waited_are_nobodys_fault() -> None:
    for waited in (True, False):
        made = flow(max_tokens=9)
        made.assign(BOTH, 0.0)
        made.output(Leg.PREFILL, out(0, 7), 1.0)
        if waited:
            made.wait(Leg.DECODE, False, 2.0)
        actions = made.output(Leg.DECODE, failed(Reason.KV_EXPIRED), 300.0)
        assert Blame(frozenset() if waited else BOTH, Reason.KV_EXPIRED) in actions
