"""The weights of a worker that runs: it pauses, gets others in their places, sleeps, and goes on.

    READY -- pause --> PAUSED -- load, sleep, wake --> PAUSED -- resume --> READY

A client's answer is of one version, whole. So whatever the worker still holds of its weights ends before they change
(`forget`): its requests, which routers begin again where no client has seen a token; the KV that it has exported; all
tiers of its prefix cache. From then on the worker has another epoch, as another process would have, so nobody who knew
the old weights asks it for more; and a KV layout with another fingerprint, so it pairs with those of its version only.

A load that fails half-way leaves weights of no version: `resume` is refused until a load has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Failure, Pause
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.lifecycle import Lifecycle, State
from millrace_serve.worker.frontend.load import LoadBoard
from millrace_serve.worker.frontend.ranks import Ranks
from millrace_serve.worker.frontend.requests import Requests
from millrace_serve.worker.frontend.wakeup import within
from millrace_serve.worker.messages import SetWeights

log = logging.getLogger(__name__)

LONGEST_VERSION = 128  # characters
SHOWN_DIGITS = 12  # of the checkpoint's hash, where no version was given


class HotWeights:
    def __init__(
        self,
        config: WorkerConfig,
        lifecycle: Lifecycle,
        ranks: Ranks,
        requests: Requests,
        board: LoadBoard,
        metrics: Metrics,
        forget: Callable[[str], Awaitable[None]],
        start: Callable[[Path | None], Awaitable[None]],
        stop: Callable[[], Awaitable[None]],
    ) -> None:
        """`forget(why)` ends everything of the present weights; `start` and `stop` are those of the ranks."""
        self._config = config
        self._lifecycle = lifecycle
        self._ranks = ranks
        self._requests = requests
        self._board = board
        self._metrics = metrics
        self._forget, self._start, self._stop = forget, start, stop
        self._path = config.model
        self._given = ""  # version; empty: the checkpoint's hash stands for it
        self._asleep = False
        self._broken = ""  # why there are weights of no version
        self._turn = asyncio.Lock()
        self._actions: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> str:
        """Empty before the ranks are up."""
        info = self._ranks.info
        return self._given or ("" if info is None else info.layout.model_hash[:SHOWN_DIGITS])

    def show(self) -> None:
        """Have the metric name the present version."""
        self._metrics.weights.clear()
        self._metrics.weights.labels(version=self.version).set(1)

    async def to_the_end(self, action: Coroutine[None, None, None]) -> None:
        """Carry out one of the actions below, whole even if the caller goes away meanwhile."""
        task = asyncio.create_task(action)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)
        await asyncio.shield(task)

    async def pause(self, drop: bool) -> None:
        """Returns when no step is under way."""
        async with self._turn:
            if self._lifecycle.state is not State.PAUSED:
                self._requests.check_admission()
                self._lifecycle.to(State.PAUSED)
            if self._asleep:
                return
            self._tell_engines(on=True)
            if drop:
                for id in self._requests:
                    self._requests.fail(id, Failure(Reason.NOT_READY, "the worker is paused"))
            async with within(self._config.timeouts.stall, "the last step before the pause"):
                await self._quiet()

    async def resume(self) -> None:
        async with self._turn:
            if self._lifecycle.state is State.READY:
                return
            self._check_paused()
            if self._broken:
                raise MillraceError(Reason.NOT_READY, f"load weights first: {self._broken}")
            self._tell_engines(on=False)
            self._lifecycle.to(State.READY)

    async def load(self, path: str, version: str) -> None:
        async with self._turn:
            self._check_paused()
            if not path:
                raise convert.invalid("path", "must name the folder of a checkpoint")
            order = SetWeights(path, _checked(version) or Path(path).name)
            if refused := await self._ranks.set_weights(SetWeights(path, order.version, check=True)):
                raise convert.invalid("path", f"{path} cannot be loaded: {refused}")
            await self._forget(f"weights {order.version} are being loaded")
            await self._quiet()  # also the copies of cached pages
            await self._set(order)

    async def sleep(self) -> None:
        async with self._turn:
            if self._asleep:
                return
            self._check_paused()
            await self._forget("the worker goes to sleep")
            await self._stop()
            self._asleep = True
            self._lifecycle.advance(State.PAUSED, "asleep")

    async def wake(self, path: str, version: str) -> None:
        """A rank that fails ends the worker, as at a start; ranks that take too long are stopped."""
        async with self._turn:
            if not self._asleep:
                self._check_paused()
                return
            if path:
                self._path, self._given = Path(path), _checked(version) or Path(path).name
            try:
                await self._start(self._path)
            except MillraceError:
                await self._stop()
                raise
            self._asleep, self._broken = False, ""
            self._lifecycle.advance(State.PAUSED, "")
            if self._given:
                await self._set(SetWeights("", self._given))
            self.show()

    async def _set(self, order: SetWeights) -> None:
        """Raises MillraceError when a rank could not; others may have the new weights by then."""
        self._lifecycle.advance(State.PAUSED, f"loading weights {order.version}")
        self._broken = "other weights were being loaded"
        if failed := await self._ranks.set_weights(order):
            self._broken = f"weights {order.version} were not loaded: {failed}"
            self._lifecycle.advance(State.PAUSED, self._broken)
            raise MillraceError(Reason.INTERNAL, self._broken)
        self._path, self._given, self._broken = Path(order.path) if order.path else self._path, order.version, ""
        self._lifecycle.advance(State.PAUSED, "")
        log.info("weights are now version %s, of %s", order.version, self._path)
        self.show()

    def _tell_engines(self, on: bool) -> None:
        for replica in range(self._config.dp):
            self._ranks.send(replica, Pause(on))

    async def _quiet(self) -> None:
        while not all(load.paused for load in self._board.loads):
            await self._board.changed.wait()

    def _check_paused(self) -> None:
        if self._lifecycle.state is not State.PAUSED:
            raise MillraceError(Reason.NOT_READY, f"the worker is {self._lifecycle.state}; pause it first")
        if self._asleep:
            raise MillraceError(Reason.NOT_READY, "the worker is asleep; wake it first")


def _checked(version: str) -> str:
    if len(version) > LONGEST_VERSION:
        raise convert.invalid("version", f"has {len(version)} characters; at most {LONGEST_VERSION} are allowed")
    return version
