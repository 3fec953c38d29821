"""Rounds of sending: who gets a turn when, and what a stream makes of it. Time is a script: nothing here waits."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from millrace.v1 import common_pb2, inference_pb2
from millrace_common.reasons import Reason
from millrace_router.config import Timeouts
from millrace_router.flow.flow import Flow, Stage, SubRequest
from millrace_router.flow.rounds import LONGEST_FLUSH_DELAY_S, SLICE_S, Rounds, flush_delay_s
from millrace_router.flow.stream import Continuation, Delta, Stream
from millrace_router.text.message import ParsedOutput
from millrace_rpc.errors import MillraceError

SECONDS = st.floats(0, 1)


@given(SECONDS, SECONDS, SECONDS)
@example(0.006, 0.5, 0.0).via("half of the streams were behind")
@example(3.0, 1.0, 0.0).via("the longest rest")
@example(0.006, 1.0, 0.03).via("the interval")
def test_a_rest_is_the_part_that_was_behind_or_the_interval(took: float, behind: float, interval: float) -> None:
    rest = flush_delay_s(took, behind, interval)
    assert rest == max(behind * min(took, LONGEST_FLUSH_DELAY_S), interval - took)
    assert 0 <= rest <= max(LONGEST_FLUSH_DELAY_S, interval)


class Loop:
    """The part of an event loop that Rounds uses, on a clock that stands still but for `spend` and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = 0
        self._ready: list[Callable[[], None]] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def call_soon(self, function: Callable[[], None]) -> None:
        self._ready.append(function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        self.call_at(self.now + delay_s, function)

    def call_at(self, at: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (at, len(self._timers) + self.turns * 1000, function))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._ready or self._timers:
            if not self._ready:
                self.now = max(self.now, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self.now:
                self._ready.append(heapq.heappop(self._timers)[2])
            self.turns += 1
            ready, self._ready = self._ready, []
            for function in ready:
                function()


@given(
    joins=st.lists(st.floats(0, 0.05), min_size=1, max_size=60),
    cost_s=st.sampled_from([0.0, 0.00004, 0.001, 0.01]),
    interval_s=st.sampled_from([0.0, 0.03]),
)
def test_everybody_gets_one_turn_in_order(joins: list[float], cost_s: float, interval_s: float) -> None:
    """And nobody waits for more than the round that runs, its rest, and the turns before."""
    loop = Loop()
    rounds, asked, got = Rounds(loop, interval_s, loop.time), [], []  # type: ignore[arg-type]

    def join(i: int) -> None:
        def turn() -> None:
            got.append((i, loop.turns, loop.now))
            loop.spend(cost_s)

        asked.append((i, loop.now))
        rounds.join(turn)

    for i, at in enumerate(joins):
        loop.call_at(at, lambda i=i: join(i))
    loop.run()
    assert [i for i, _, _ in got] == [i for i, _ in asked]
    assert len({turn for _, turn, _ in got}) == len(got), "each in a turn of the event loop"
    longest = 2 * len(joins) * cost_s + max(LONGEST_FLUSH_DELAY_S, interval_s) + 1e-9
    assert all(at - since <= longest for (_, _, at), (_, since) in zip(got, asked, strict=True))


def sizes(cost_s: float, step_s: float = 0.01, streams: int = 100, steps: int = 200) -> list[int]:
    """Tokens of each message, but for the first fifty steps; a worker's step brings every stream a token."""
    loop, sent, new = Loop(), list[tuple[float, int]](), [0] * streams
    rounds = Rounds(loop, 0.0, loop.time)  # type: ignore[arg-type]

    def turn(stream: int) -> None:
        sent.append((loop.now, new[stream]))
        new[stream] = 0
        loop.spend(cost_s)

    def step() -> None:
        for stream in range(streams):
            new[stream] += 1
            if new[stream] == 1:
                rounds.join(lambda stream=stream: turn(stream))
            else:
                rounds.wait()

    for number in range(steps):
        loop.call_at(number * step_s, step)
    loop.run()
    return [size for at, size in sent if at > 50 * step_s]


@pytest.mark.parametrize(("cost_s", "least", "most"), [(0.00003, 1, 1), (0.00008, 1, 1), (0.00015, 2.5, 3.5)])
def test_a_router_that_is_behind_sends_larger_messages(cost_s: float, least: float, most: float) -> None:
    """One that keeps up does not, even where sending takes more than half of its time. In the last case a round takes
    one and a half steps, and with its rest three.
    """
    found = sizes(cost_s)
    assert least <= sum(found) / len(found) <= most


async def test_a_turn_that_fails_costs_nobody_else_theirs() -> None:
    loop, errors, done = asyncio.get_running_loop(), list[BaseException](), asyncio.Event()
    loop.set_exception_handler(lambda _, about: errors.append(about["exception"]))
    rounds = Rounds(loop, 0.0)
    rounds.join(deque().popleft)
    rounds.join(done.set)
    await done.wait()
    assert [type(error) for error in errors] == [IndexError]


@pytest.mark.parametrize(("writes", "least", "most"), [(False, 0, 3), (True, 4, 12)])
def test_a_long_round_leaves_the_event_loop_to_others(writes: bool, least: int, most: int) -> None:
    """Turns that wake tasks have one of the event loop each; those that write at once share one for a slice."""
    loop, now, got = Loop(), [0.0], list[str]()
    rounds = Rounds(loop, 0.0, lambda: now[0])  # type: ignore[arg-type]

    def turn() -> bool:
        now[0] += SLICE_S / 4
        got.append("turn")
        return writes

    for _ in range(20):
        rounds.join(turn)
    three_turns_later = lambda: loop.call_soon(lambda: loop.call_soon(lambda: got.append("other")))  # noqa: E731
    loop.call_soon(three_turns_later)
    loop.run()
    assert least <= got.index("other") <= most and got.count("turn") == 20


# ------------------------------------------------------------------------------------- streams


class Held:
    """Rounds of a router that is as busy as the test wants."""

    def __init__(self) -> None:
        self._turns: list[Callable[[], bool]] = []
        self.waited = 0

    def wait(self) -> None:
        assert self._turns, "only a stream that has joined waits"
        self.waited += 1

    def join(self, turn: Callable[[], bool]) -> None:
        self._turns.append(turn)
        assert len(self._turns) == 1, "a stream joins a round once"

    def run(self) -> None:
        turns, self._turns = self._turns, []
        for turn in turns:
            turn()


class Script:
    """A stream over one continuation whose tokens the test makes, and everything that was read from it."""

    def __init__(self, rounds: Held | Rounds, direct: bool = False) -> None:
        """`direct`: with a sink."""
        self.stream = Stream(lambda error: None, 10, rounds)  # type: ignore[arg-type]
        self.flow = Flow(Timeouts(), max_tokens=1000, max_attempts=1, deadline=None, progress=0.0, queue_s=1.0)
        self.flow.assign(frozenset({SubRequest.DECODE}), 0.0)
        self.text = text = SimpleNamespace(
            push=lambda ids: (ParsedOutput(text="".join(map(chr, ids))), len(ids)),
            flush=lambda cut: ParsedOutput(text="!"),
            stopped=False,
            stopped_by="",
        )
        generation = SimpleNamespace(
            flow=self.flow,
            cached_tokens=0,
            usage=inference_pb2.Usage(),
            version="",
            cancel=self.flow.cancel,
            stop=self.flow.stop,
        )
        self.stream.continuations.append(Continuation(0, generation, text, lambda gap: None))  # type: ignore[arg-type]
        self.read: list[Delta] = []
        self.ready, self.pushed = True, 0
        self.stream.sink = self if direct else None
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for delta in self.stream.deltas():
            self.read.append(delta)

    def push(self, delta: Delta) -> None:
        self.read.append(delta)
        self.pushed += 1

    def make(self, count: int) -> None:
        """Some tokens in one step, as a worker's Link brings them."""
        first = len(self.flow.outputs)
        tokens = range(first, first + count)
        self.flow.outputs += tokens
        self.flow.logprobs += [common_pb2.TokenLogprobs(sampled={"token_id": token}) for token in tokens]
        self.stream.wake()

    def finish(self) -> None:
        self.flow.stage, self.flow.finish_reason = Stage.DONE, common_pb2.FINISH_REASON_LENGTH
        self.stream.wake()


async def turn() -> None:
    """What is ready runs, and what that makes ready."""
    for _ in range(4):
        await asyncio.sleep(0)


EVENTS = st.lists(
    st.one_of(st.integers(1, 5), st.sampled_from(["round", "round", "the client reads or not"])), max_size=40
)


@given(EVENTS, st.booleans())
def test_a_busy_router_merges_without_loss(events: list[int | str], direct: bool) -> None:
    async def run() -> None:
        rounds = Held()
        script, made, behind = Script(rounds, direct), 0, 0
        await turn()
        for event in events:
            if isinstance(event, int):
                behind += event if made else 0  # the first ones do not wait
                made += event
                script.make(event)
            elif event != "round":
                script.ready = not script.ready
            else:
                rounds.run()
                behind = 0
            await turn()
            assert sum(len(delta.token_ids) for delta in script.read) == made - behind
        script.finish()
        rounds.run()
        await script.reader
        assert [token for delta in script.read for token in delta.token_ids] == list(range(made))
        for delta in script.read:
            assert [entry.sampled.token_id for entry in delta.logprobs] == delta.token_ids
        assert "".join(delta.parsed.text for delta in script.read) == "".join(map(chr, range(made))) + "!"
        assert [bool(delta.finish_reason) for delta in script.read] == [False] * (len(script.read) - 1) + [True]
        assert [delta.first for delta in script.read][:2] in ([True], [True, False])

    asyncio.run(run())


async def test_waiting_for_a_round_is_not_the_clients_fault() -> None:
    """Only steps that came while the reader was away count towards SLOW_CLIENT; ten would end this stream."""
    rounds = Held()
    script = Script(rounds)
    await turn()
    script.make(1)
    await turn()
    for _ in range(50):
        script.make(1)
    rounds.run()
    await turn()
    assert [len(delta.token_ids) for delta in script.read] == [1, 50] and rounds.waited == 49
    script.finish()
    rounds.run()
    await script.reader


async def test_a_client_may_be_behind_by_exactly_the_limit() -> None:
    rounds = Held()
    script = Script(rounds)
    for step in range(11):
        assert not script.flow.ended, step
        script.make(1)
    await turn()
    rounds.run()
    with pytest.raises(MillraceError, match="more than 10 engine steps"):
        await script.reader


async def test_a_sink_gets_all_but_the_first_and_the_last_delta() -> None:
    rounds = Held()
    script = Script(rounds, direct=True)
    for _ in range(5):
        script.make(1)
        await turn()
        rounds.run()
    script.finish()
    rounds.run()
    await script.reader
    assert script.pushed == 4 and [delta.token_ids for delta in script.read] == [[0], [1], [2], [3], [4], []]
    assert script.read[-1].finish_reason


async def test_a_stop_string_in_a_sinks_delta_ends_the_reader() -> None:
    rounds = Held()
    script = Script(rounds, direct=True)
    script.make(1)
    await turn()
    script.text.stopped, script.text.stopped_by = True, "x"
    script.make(1)
    rounds.run()
    await script.reader
    assert script.pushed == 1 and [delta.finish_reason for delta in script.read] == [0, common_pb2.FINISH_REASON_STOP]


async def test_an_error_of_the_workers_or_of_the_sink_reaches_the_reader() -> None:
    rounds = Held()
    script, broken = Script(rounds, direct=True), Script(other := Held(), direct=True)
    for one in (script, broken):
        one.make(1)
    await turn()
    script.stream.cancel(MillraceError(Reason.WORKER_LOST, "gone"))
    script.stream.wake()
    rounds.run()
    with pytest.raises(MillraceError, match="gone"):
        await script.reader
    broken.push = None  # type: ignore[assignment]
    broken.make(1)
    other.run()
    with pytest.raises(TypeError):
        await broken.reader
