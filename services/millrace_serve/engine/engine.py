"""The step loop of one replica.

    submit(msg)*  ->  step()  ->  Events

`step` schedules and launches step N+1, then reads and commits step N (overlap), or reads what it has just launched
(no overlap). A sequence that leaves with step N may still be named by step N+1: the tokens of that step are dropped,
and the sequence's pages are kept, until N+1 is committed.
"""

from __future__ import annotations

from millrace_serve.engine.cache.block_pool import InvariantError
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import EngineInput, Events, Load
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.schedule.scheduler import Scheduler
from millrace_serve.engine.step.batch import BatchBuilder, StepBatch
from millrace_serve.engine.step.lockstep import Lockstep
from millrace_serve.engine.step.runner import Runner, StepHandle

IDLE_PLAN = Plan([], [])
DP_POLL_S = 0.005  # how often replicas meet while none has work: the most that a first request waits for them
COMPILE_POLL_S = 0.005  # how often to look for the end of a grammar's compilation while there is no other work


class Engine:
    """Not thread-safe: one thread submits and steps."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        grammars: Grammars,
        builder: BatchBuilder,
        runner: Runner,
        pool: KvPool,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._scheduler = scheduler
        self._grammars = grammars
        self._builder = builder
        self._runner = runner
        self._lockstep = lockstep or Lockstep()
        self._in_flight: tuple[Plan, StepHandle] | None = None
        self._stopping = False
        self.stopped = False  # the last step was taken, here and on every other replica
        self._stale = True  # something happened since schedule() last found nothing to do

    def submit(self, msg: EngineInput) -> None:
        """Never raises for a bad request: it ends in an output with finish ERROR, in the next step's Events."""
        for admitted in self._grammars.admit(msg):
            self._scheduler.handle(admitted)
            self._stale = True

    def step(self) -> Events:
        """One step: schedule, build, launch, commit the previous one. Call it while `has_work`, or after `wait_s`."""
        for msg in self._grammars.admitted():
            self._scheduler.handle(msg)
        plan = self._scheduler.schedule()
        self._stale = plan is not None
        self._scrub()
        previous, self._in_flight = self._in_flight, self._launch(plan)
        if previous is not None:
            self._commit(previous)
        if self._in_flight is not None and not self.config.overlap:
            self._commit(self._in_flight)
            self._in_flight = None
        events = self._scheduler.take_events()
        events.load = self.load()
        return events

    def stop(self) -> None:
        """End all replicas with the next step, after which `stopped` is true on each of them."""
        self._stopping = True

    def has_work(self) -> bool:
        """False: step() would do nothing before the next message, or before `wait_s` has passed."""
        return self._stale or self._in_flight is not None or bool(self._scheduler.outbox.events)

    def wait_s(self) -> float | None:
        """Seconds to wait for messages before the next step(): 0 = none, None = until one comes."""
        if self.has_work():
            return 0.0
        waits = (
            self._scheduler.requests.seconds_to_deadline(),
            DP_POLL_S if self._lockstep.all_gather else None,
            COMPILE_POLL_S if self._grammars.waiting else None,
        )
        return min((wait for wait in waits if wait is not None), default=None)

    def load(self) -> Load:
        return self._scheduler.load()

    def check_idle(self) -> None:
        """Raise InvariantError with the numbers if pages are lost, or are not all back when no request is live."""
        cache, live = self._scheduler.pages.cache, self._scheduler.requests.live
        cache.check()
        pool = cache.pool
        if not live and pool.num_free + pool.num_cached != pool.total:
            raise InvariantError(
                f"no request is live, but of {pool.total} pages {pool.num_running} are running and "
                f"{pool.num_published} published (free {pool.num_free}, cached {pool.num_cached})"
            )

    def close(self) -> None:
        """End the runner and the followers. Live requests are dropped."""
        self._lockstep.share(None)
        self._grammars.close()
        self._runner.close()

    def _launch(self, plan: Plan | None) -> tuple[Plan, StepHandle] | None:
        agreement = self._lockstep.agree(plan, self._stopping)
        self.stopped = agreement.last
        if not agreement.anybody_works:
            return None
        num_queries = 1 + self.config.num_drafts(agreement.most_sampled)
        batch = StepBatch.idle(num_queries) if plan is None else self._builder.build(plan, num_queries)
        agreement.tell(batch)
        self._lockstep.share(batch)
        return plan or IDLE_PLAN, self._runner.launch(batch)

    def _commit(self, step: tuple[Plan, StepHandle]) -> None:
        plan, handle = step
        self._scheduler.commit(plan, handle.result())
        self._stale = True

    def _scrub(self) -> None:
        """Poison the pages that were freed since the last step: even if another sequence has them already, no launched
        step has written to them yet.
        """
        freed = self._scheduler.pages.cache.pool.freed
        if freed and self.config.poison:
            self.pool.scrub(freed)
        freed.clear()
