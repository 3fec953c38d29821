"""What a rank's loop sends and when, on a clock of the test."""

from types import SimpleNamespace
from typing import Any

import pytest
from millrace_serve.engine.core import Events, Load, RequestId, SequenceOutput
from millrace_serve.worker.rank import loop as loop_module
from millrace_serve.worker.rank import process
from millrace_serve.worker.rank.loop import LOAD_INTERVAL_S, QUIET_S, EngineLoop


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.works, self.checks = 100.0, True, 0
        self.sent: list[Events] = []
        monkeypatch.setattr(loop_module.time, "monotonic", lambda: self.now)
        engine: Any = SimpleNamespace(has_work=lambda: self.works, check_idle=self._check, wait_s=lambda: None)
        self.loop = EngineLoop(engine, None, self.sent.append, None)  # type: ignore[arg-type]

    def _check(self) -> None:
        self.checks += 1

    def ship(self, steps: int, *outputs: SequenceOutput) -> int:
        """How many messages it takes."""
        before = len(self.sent)
        self.loop._ship(Events(outputs=list(outputs), load=Load(counters={"steps": steps})))
        return len(self.sent) - before


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_load_alone_of_a_busy_engine_goes_at_intervals(bench: Bench) -> None:
    assert bench.ship(1) == 1 and bench.ship(2) == 0, "too soon"
    assert bench.ship(3, SequenceOutput(RequestId(1, 0), 0, [])) == 1, "an output never waits"
    bench.now += 0.9 * LOAD_INTERVAL_S
    assert bench.ship(4) == 0
    bench.now += 0.2 * LOAD_INTERVAL_S
    assert bench.ship(5) == 1 and bench.ship(5) == 0, "it has not changed"
    bench.works = False
    assert bench.ship(6) == 1, "the last word of an engine that pauses"


def test_pool_is_checked_once_in_each_pause(bench: Bench) -> None:
    for _ in range(2):
        bench.loop._check_when_quiet(active=True)
        assert bench.loop._wait_s() == QUIET_S
        before = bench.checks
        for seconds, checks in ((0.5 * QUIET_S, 0), (0.6 * QUIET_S, 1), (QUIET_S, 1), (9 * QUIET_S, 1)):
            bench.now += seconds
            bench.loop._check_when_quiet(active=False)
            assert bench.checks - before == checks
        assert bench.loop._wait_s() is None, "it sleeps until a message comes"


@pytest.mark.parametrize(("num_pages", "context"), [(3, 129), (1000, 8192)])
def test_context_is_bounded_by_the_pages_of_the_pool(num_pages: int, context: int) -> None:
    pool = SimpleNamespace(num_pages=num_pages, layout=SimpleNamespace(page_size=64))
    parts: Any = SimpleNamespace(pool=pool, max_context=8192)
    assert process._context(parts, 0) == context
