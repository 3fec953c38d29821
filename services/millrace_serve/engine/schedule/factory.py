"""Makes the scheduler of a role."""

from collections.abc import Callable

from millrace_common.step_times import StepTimes

from millrace_serve.engine.cache.kv_cache import KvCache
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.requests import EngineRequests
from millrace_serve.engine.schedule.scheduler import Scheduler

Clock = Callable[[], float]
UNKNOWN = StepTimes()


def make_scheduler(
    config: EngineConfig,
    role: Role,
    facts: ModelFacts,
    clock: Clock,
    grammars: Grammars,
    times: StepTimes = UNKNOWN,
) -> Scheduler:
    """`times` of steps, until they are measured."""
    requests = EngineRequests(config, role, facts, clock, grammars)
    pages = Pages(config, KvCache(config.num_pages, config.page_size, config.prefix_cache, clock))
    return Scheduler(config, role, requests, pages, times)
