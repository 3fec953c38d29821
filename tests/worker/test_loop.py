"""The main loop of a rank: what it ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from millrace_serve.engine.core import Events, Load
from millrace_serve.engine.engine import Engine
from millrace_serve.worker import loop
from millrace_serve.worker.loop import EngineLoop


class ScriptedEngine:
    """Has work until its loads are told, and no other events."""

    def __init__(self, *loads: Load) -> None:
        self._loads = list(loads)

    @property
    def stopped(self) -> bool:
        return not self._loads

    def load(self) -> Load:
        return Load()

    def has_work(self) -> bool:
        return True

    def wait_s(self) -> float:
        return 0.0

    def step(self) -> Events:
        return Events(load=self._loads.pop(0))

    def close(self) -> None: ...


class Nothing:
    """An empty inbox, and a reporter of garbage collections that has none."""

    def receive(self, timeout_s: float | None) -> list[Any]:
        return []

    def flush(self) -> None: ...


def test_that_sequences_run_is_never_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step may hang; whoever waits for the next load must know of it."""
    monkeypatch.setattr(loop, "LOAD_INTERVAL_S", 1e9)
    loads = [Load(waiting=1), *(Load(running=1, steps=steps) for steps in (1, 2)), Load(steps=3)]
    shipped: list[Events] = []
    nothing: Any = Nothing()
    report = cast(Callable[[Any], None], shipped.append)
    EngineLoop(cast(Engine, ScriptedEngine(*loads)), nothing, report, nothing, nothing).run()
    assert [events.load for events in shipped] == [loads[1]]
