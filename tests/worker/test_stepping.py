"""Loops of replicas that step together: they sleep, wake each other, and wait for one that starts late."""

import itertools
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from engine.harness import SETTINGS, TINY, request
from engine.joined import join_all
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Events, Submit
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.sim.factory import build_sim_engine
from millrace_serve.engine.sim.runner import SimRunner, SimSettings
from millrace_serve.worker.channels import Receiver, Sender
from millrace_serve.worker.messages import RankFailed, Report, SetWeights, Stop, ToEngine, WeightsSet
from millrace_serve.worker.rank import process
from millrace_serve.worker.rank.loop import EngineLoop, Upkeep
from millrace_testing import HANG_S


def until(condition: Callable[[], bool]) -> None:
    for _ in range(24_000):
        if condition():
            return
        time.sleep(0.005)
    raise TimeoutError


def no_weights(order: SetWeights) -> WeightsSet:
    raise AssertionError("nobody asks for other weights")


class Loop:
    """The loop of one replica, in a thread."""

    def __init__(
        self, lockstep: Lockstep, folder: Path, index: int, context: zmq.Context, settings: SimSettings = SETTINGS
    ) -> None:
        self.settings = settings
        self.inbox: Receiver[ToEngine] = Receiver(context, f"ipc://{folder}/{index}", ToEngine)
        self.outbox: Sender[ToEngine] = Sender(context, self.inbox.endpoint)
        self.tokens: queue.Queue[int] = queue.Queue()  # of which room
        self.num_steps, self.lockstep, self.checked = 0, lockstep, threading.Event()
        self.num_waits, self.waits_for_ever = 0, False
        self.delays: list[float] = []  # of launches, in seconds
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        engine = build_sim_engine(EngineConfig.model_validate(TINY), Role.UNIFIED, self.settings, self.lockstep)
        launch, check_idle, delay = engine.launch, engine.check_idle, engine.launch_delay_s
        receive = self.inbox.receive

        def wait(wait_s: float | None = 0.0, fds: Sequence[int] = ()) -> list[ToEngine]:
            self.num_waits += 1
            self.waits_for_ever = wait_s is None
            messages = receive(wait_s, fds)
            self.waits_for_ever = False
            return messages

        def delayed() -> float:
            self.delays.append(delay())
            return self.delays[-1]

        def check() -> None:
            check_idle()
            self.checked.set()

        def counted() -> None:
            self.num_steps += 1
            launch()

        self.inbox.receive = wait  # type: ignore[method-assign]
        engine.launch_delay_s = delayed  # type: ignore[method-assign]
        engine.launch = counted  # type: ignore[method-assign]
        engine.check_idle = check  # type: ignore[method-assign]
        EngineLoop(engine, self.inbox, self._report, Upkeep(0, self._report, engine.progress.busy, no_weights)).run()

    @property
    def asleep(self) -> bool:
        """Nothing but a message or a call of another replica wakes it, and there is no call."""
        return self.waits_for_ever and not select.select(self.lockstep.fds, (), (), 0)[0]

    def _report(self, report: Report) -> None:
        if isinstance(report, Events):
            for output in report.outputs:
                for _ in output.tokens:
                    self.tokens.put(output.id.room)


@pytest.fixture(params=["aa", "ab"])
def loops(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Loop]]:
    with zmq.Context() as context:
        made = [Loop(one, tmp_path, i, context) for i, one in enumerate(join_all(1, request.param))]
        yield made
        end(*made)


def end(*loops: Loop) -> None:
    for loop in loops:
        loop.outbox.send(Stop())
    for loop in loops:
        loop.thread.join(HANG_S)
    alive = [loop.thread.is_alive() for loop in loops]
    for loop in loops:
        loop.outbox.close()
        loop.inbox.close()
    assert not any(alive), "they did not end together"


def ask(loop: Loop, room: int, count: int) -> None:
    loop.outbox.send(Submit(request(room, [20, 21, 22], max_tokens=count)))
    for _ in range(count):
        loop.tokens.get(timeout=HANG_S)


def all_asleep(loops: list[Loop]) -> bool:
    before = [loop.num_waits for loop in loops]
    return all(loop.asleep for loop in loops) and [loop.num_waits for loop in loops] == before


def test_idle_loops_do_nothing_and_wake_for_each_other(loops: list[Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_serve.worker.rank.loop.QUIET_S", 0.2)
    for loop in loops:
        loop.thread.start()
    ask(loops[0], 1, 3)
    assert all(loop.checked.wait(HANG_S) for loop in loops), "the pools are checked once, after a quiet time"
    until(lambda: all_asleep(loops))
    before = [loop.num_steps for loop in loops]
    for room in range(2, 12):
        ask(loops[room % 2], room, 2)
    steps = [loop.num_steps - count for loop, count in zip(loops, before, strict=True)]
    assert all(count >= 20 for count in steps), "each has a part in the steps of the other"


def test_replica_that_starts_late_is_waited_for(loops: list[Loop]) -> None:
    """Such as one that compiles for minutes: the others have joined with it, and sleep until it is ready."""
    loops[0].thread.start()
    until(lambda: loops[0].num_waits > 0)
    loops[1].thread.start()
    ask(loops[0], 1, 4)
    ask(loops[1], 2, 4)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_loop_that_is_called_while_a_step_runs_does_not_spin(hosts: str, tmp_path: Path) -> None:
    """A faster replica's vector of the next step lies there while this one's step runs."""
    slow = SETTINGS.model_copy(update={"step_s": 0.05})
    with zmq.Context() as context:
        loops = [Loop(one, tmp_path, i, context, slow) for i, one in enumerate(join_all(1, hosts))]
        for loop in loops:
            loop.thread.start()
        for room, loop in enumerate(loops):
            loop.outbox.send(Submit(request(room, [20, 21, 22], max_tokens=20)))
        loops[0].tokens.get(timeout=HANG_S)
        steps, waits = loops[0].num_steps, loops[0].num_waits
        for _ in range(10):
            loops[0].tokens.get(timeout=HANG_S)
        assert loops[0].num_steps - steps >= 5
        assert loops[0].num_waits - waits < 10 * (loops[0].num_steps - steps)
        end(*loops)


def test_prompt_is_in_the_step_behind_the_one_that_runs(tmp_path: Path) -> None:
    """It comes while a step runs. Launched at once, the next step would not have it: its first token would come behind
    three of the other request, not two.
    """
    slow = SETTINGS.model_copy(update={"step_s": 0.04})
    with zmq.Context() as context:
        loop = Loop(Lockstep(), tmp_path, 0, context, slow)
        loop.thread.start()
        before = []
        for room in range(2, 7):
            loop.outbox.send(Submit(request(1, [20, 21, 22], max_tokens=12)))
            for _ in range(4):
                assert loop.tokens.get(timeout=HANG_S) == 1
            loop.outbox.send(Submit(request(room, [30, 31, 32], max_tokens=1)))
            rooms = [loop.tokens.get(timeout=HANG_S) for _ in range(9)]
            before.append(rooms.index(room))
        end(loop)
    assert min(before) == 2, before


def test_one_slow_step_does_not_slow_those_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of its kind: until the next, nothing else is known of it."""
    steps = itertools.count()
    monkeypatch.setattr(SimRunner, "_seconds", lambda self, batch: 0.5 if next(steps) == 1 else 0.02)
    with zmq.Context() as context:
        loop = Loop(Lockstep(), tmp_path, 0, context)
        loop.thread.start()
        ask(loop, 1, 20)
        end(loop)
    assert sum(seconds > 0.25 for seconds in loop.delays) <= 1, loop.delays


def test_follower_whose_inbox_fails_has_failed(tmp_path: Path) -> None:
    """As a leader: otherwise the frontend waits for its answers for ever."""
    context, failed = zmq.Context(), queue.Queue[Report]()
    inbox: Receiver[ToEngine] = Receiver(context, f"ipc://{tmp_path}/inbox", ToEngine)
    Sender[ToEngine](context, inbox.endpoint).send(SetWeights("", ""))
    parts: Any = SimpleNamespace(engine=None, run=lambda: None)
    process._step(parts, inbox, failed.put, Upkeep(1, failed.put, nullcontext, no_weights))
    assert failed.get(timeout=HANG_S) == RankFailed("the inbox failed: AssertionError: nobody asks for other weights")
    context.destroy(linger=0)
