"""The step loop of one replica.

    submit(msg)*  ->  launch()  ->  commit()  ->  events()

`launch` schedules and launches step N+1; `commit` reads step N (overlap), or what was just launched (no overlap). A
sequence that leaves with step N may still be named by step N+1: the tokens of that step are dropped, and the sequence's
pages are kept, until N+1 is committed.

With overlap, step N+1 is launched shortly before step N is expected to end (step/forecast.py): what is submitted
until then takes part in it, and `reserve` serves those whose KV comes from elsewhere meanwhile.

Where step N+1 depends on the tokens of step N (`Plan.awaited`), `launch` reads step N first: no sequence sits it out.
"""

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from millrace_serve.engine.cache.block_pool import InvariantError
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.core import EngineInput, Events, Load, Pause
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.packing import Copies
from millrace_serve.engine.offload.page_copier import PageCopier
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.schedule.scheduler import Scheduler
from millrace_serve.engine.step.batch import BatchBuilder
from millrace_serve.engine.step.forecast import Forecast, Kind, kind
from millrace_serve.engine.step.runner import Runner, StepHandle

IDLE_PLAN = Plan([], [])
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
        copier: PageCopier | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._scheduler = scheduler
        self._grammars = grammars
        self._builder = builder
        self._runner = runner
        self.host = scheduler.pages.cache.host
        self.host.open(copier or PageCopier(pool, config.host_pages(pool.layout.page_bytes)))
        self._lockstep = lockstep or Lockstep()
        self.progress = self._lockstep.progress
        self._forecast = Forecast(lambda: self.progress.clock())
        # Between `launch` and `commit` there may be two.
        self._in_flight: deque[tuple[Plan, Kind | None, StepHandle]] = deque()
        self._ahead = False  # `commit` leaves the newest in flight
        self._awaited = False  # the newest is committed before the next one is scheduled
        self._stopping = False
        self.stopped = False  # the last step was taken, here and on every other replica
        self._stale = True  # something happened since schedule() last found nothing to do
        self._paused = False

    def open_store(self, secret: bytes = b"", *, patient: bool = True) -> None:
        """Keep cached pages in a folder, too, if one is set. `patient`: raises TransferError if it is of no use."""
        self.host.disk.open(self.config, self.pool.layout.fingerprint, self.host.copier.memory, secret, patient)

    def submit(self, msg: EngineInput) -> None:
        """Never raises for a bad request: it ends in an output with finish ERROR, in the next step's Events."""
        self._stale = True
        if isinstance(msg, Pause):
            self._paused = msg.on
            return
        for admitted in self._grammars.admit(msg):
            self._scheduler.handle(admitted)

    def step(self) -> Events:
        """A whole step at once. Call it while `has_work`, or after `wait_s`."""
        self.launch()
        self.commit()
        return self.events()

    def launch(self) -> None:
        """Schedule, build and launch the next step, if there is anything to do."""
        for msg in self._grammars.admitted():
            self._scheduler.handle(msg)
        self.host.poll()
        if self._awaited:
            self._ahead = False
            self.commit()
        plan = None if self._paused else self._scheduler.schedule()
        self._stale = plan is not None
        if (freed := self._scheduler.pages.cache.pool.freed) and "poison" in self.config.checks:
            self.pool.scrub(freed)  # others may have them already, but no launched step has written to them yet
        freed.clear()
        self._ahead = self._launch(plan) and self.config.overlap
        self._copy()

    def reserve(self) -> None:
        """While a step runs: pages for prompts whose KV somebody offers. A freed page is poisoned between two steps, so
        with that check on prompts wait for the next one.
        """
        if "poison" not in self.config.checks:
            self._scheduler.reserve()
            self._copy()

    def commit(self) -> None:
        """Wait for the step before the one just launched (without overlap, for this one too), and take the results."""
        while len(self._in_flight) > self._ahead:
            self._commit(*self._in_flight.popleft())
        self._copy()

    @property
    def has_events(self) -> bool:
        return bool(self._scheduler.outbox.events)

    def events(self) -> Events:
        """What happened since the last call, and the load."""
        events = self._scheduler.take_events()
        events.load = self.load()
        return events

    def stop(self) -> None:
        """End all replicas with the next step, after which `stopped` is true on each of them."""
        self._stopping = True

    def has_work(self) -> bool:
        """False: step() would do nothing before the next message, or before `wait_s` has passed."""
        return self._stale or bool(self._in_flight) or self.has_events

    def launch_delay_s(self) -> float:
        """Seconds for which the next step should be held back, so that more can take part in it."""
        if not self._in_flight or self._paused or self._stopping:
            return 0.0
        _, of, _ = self._in_flight[-1]
        return self._forecast.launch_delay_s(of, self.progress.started_at)

    def wait_s(self) -> float | None:
        """Seconds to wait for messages or `wake_fds` before the next step(): 0 = none, None = until one comes. While
        `launch_delay_s`, messages do not end the wait.
        """
        if self.has_work() or self._lockstep.due():
            return self.launch_delay_s()
        waits = (
            None if self._paused else self._scheduler.requests.seconds_to_deadline(),
            None if self._paused else self._scheduler.seconds_to_look(),
            COMPILE_POLL_S if self._grammars.waiting else None,
            self.host.wait_s(),
        )
        return min((wait for wait in waits if wait is not None), default=None)

    @property
    def wake_fds(self) -> Sequence[int]:
        """One of them is readable when another replica has work: the next step() is due. None while a step runs: others
        may call all the time then, and the next one is due by the clock.
        """
        return () if self._in_flight else self._lockstep.fds

    def load(self) -> Load:
        load, more = self._scheduler.load(), self._runner.counts() | self.host.counts()
        load.counters.update(self.host.copier.counters | self.host.disk.counters())
        paused = self._paused and not self._in_flight and self.host.wait_s() is None
        return msgspec.structs.replace(load, paused=paused, **more) if more or paused else load

    def check_empty(self) -> None:
        """Raise RuntimeError unless it is paused and holds nothing of the weights: no request, no cached page."""
        load = self.load()
        if not load.paused or load.pages_free < load.pages_total or self._scheduler.requests.live:
            raise RuntimeError(f"the engine is not paused and empty: {load}")

    def check_idle(self) -> None:
        """Raise InvariantError with the numbers if pages are lost, or are not all back when no request is live."""
        scheduler, cache = self._scheduler, self._scheduler.pages.cache
        cache.check()
        self.host.check()
        pool, used = cache.pool, scheduler.requests.live or scheduler.served_pages
        if not used and pool.num_free + pool.num_cached != pool.total:
            raise InvariantError(
                f"no request is live, but of {pool.total} pages {pool.num_running} are running and "
                f"{pool.num_published} published (free {pool.num_free}, cached {pool.num_cached})"
            )

    def close(self) -> None:
        """End the runner and the followers. Live requests are dropped."""
        self._lockstep.close()
        self._grammars.close()
        self._runner.close()
        self.host.close()

    def _launch(self, plan: Plan | None) -> bool:
        """False: no replica has anything to do."""
        agreement = self._lockstep.agree(plan, self._stopping)
        self.stopped, self._awaited = agreement.last, agreement.awaited
        limited_s = self._scheduler.limit_s
        self._scheduler.turn, self._scheduler.limit_s = agreement.turn, agreement.limit_s
        if not agreement.anybody_works:
            self._stale |= limited_s < agreement.limit_s  # prompts may have waited for a sequence that has ended
            return False
        began = time.monotonic()
        num_queries = self.config.num_queries(max(agreement.num_sampled))
        plan = plan or IDLE_PLAN
        plan.work = agreement.widest(plan.work)
        speeds = self._scheduler.speeds
        speeds.launched(plan.work)
        self._scheduler.spare_s = agreement.spare_s - speeds.times.prompts_s(plan.work.tokens, plan.work.pairs)
        batch = self._builder.build(plan, num_queries, agreement.split)
        agreement.tell(batch)
        self._lockstep.share(batch)
        self.progress.launches(batch)
        self._in_flight.append((plan, kind(batch), self._runner.launch(batch)))
        self._forecast.launched(time.monotonic() - began)
        return True

    def _commit(self, plan: Plan, of: Kind | None, handle: StepHandle) -> None:
        late = handle.done()
        output = handle.result()
        self._forecast.finished(of, self.progress.finished(late), late)
        self._scheduler.commit(plan, output)
        self._stale = True

    def _copy(self) -> None:
        """Start the copies that were decided, on all ranks: after the scrubbing of pages that are to be filled."""
        self.host.start(lambda moves: self._lockstep.share(Copies(moves, settled=not self._in_flight)))
