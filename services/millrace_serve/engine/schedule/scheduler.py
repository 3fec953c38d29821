"""What a scheduler is to the engine."""

from __future__ import annotations

from typing import Protocol

from millrace_serve.engine.core import EngineInput, Load
from millrace_serve.engine.schedule.plan import Plan, StepOutput
from millrace_serve.engine.schedule.roster import Roster


class Scheduler(Protocol):
    roster: Roster

    def handle(self, msg: EngineInput) -> None: ...

    def schedule(self) -> Plan | None: ...

    def commit(self, plan: Plan, output: StepOutput) -> None: ...

    def load(self) -> Load: ...
