"""Makes the scheduler of a role."""

from __future__ import annotations

from collections.abc import Callable

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.schedule.decode import DecodeScheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.schedule.prefill import PrefillScheduler
from millrace_serve.engine.schedule.roster import Roster
from millrace_serve.engine.schedule.scheduler import Scheduler

Clock = Callable[[], float]


def make_scheduler(
    config: EngineConfig, role: Role, facts: ModelFacts, clock: Clock, grammars: Grammars | None = None
) -> Scheduler:
    roster = Roster(config, role, facts, clock, grammars)
    return PrefillScheduler(roster) if role is Role.PREFILL else DecodeScheduler(roster)
