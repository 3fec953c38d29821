"""The weights of a worker that runs: it pauses, gets others in their places, sleeps, and goes on.

    READY -- pause --> PAUSED -- load, sleep, wake --> PAUSED -- resume --> READY

A client's answer is of one version, whole. So whatever the worker still holds of its weights ends before they change
(`forget`): its requests, which routers begin again where no client has seen a token; the KV that it has exported; and
its prefix cache. From then on the worker has another epoch, as another process would have, so nobody who knew
the old weights asks it for more; and a KV layout with another fingerprint, so it pairs with those of its version only.

A load that fails half-way leaves weights of no version: `resume` is refused until a load has succeeded.
"""

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path

from millrace_common.reasons import Reason
from millrace_rpc.errors import FieldError, MillraceError

from millrace_serve.engine.core import Failure, Pause
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.lifecycle import State
from millrace_serve.worker.frontend.wakeup import within
from millrace_serve.worker.messages import SetWeights

log = logging.getLogger(__name__)

LONGEST_VERSION = 128  # characters


class HotWeights:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend, self._life, self._ranks = frontend, frontend.lifecycle, frontend.ranks
        self._path = frontend.config.model
        self._asleep = False
        self._broken = ""  # why there are weights of no version
        self._turn = asyncio.Lock()
        self._actions: set[asyncio.Task[None]] = set()

    async def to_the_end(self, action: Coroutine[None, None, None]) -> None:
        """Carry out one of the actions below, whole even if the caller goes away meanwhile."""
        task = asyncio.create_task(action)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)
        await asyncio.shield(task)

    async def pause(self, drop: bool) -> None:
        """Returns when no step is under way."""
        async with self._turn:
            requests = self._frontend.requests
            if self._life.state is not State.PAUSED:
                requests.check_admission()
                self._life.to(State.PAUSED)
                await self._said(paused=False)  # since the pause before, whose reports would be taken for ours
            if self._asleep:
                return
            self._tell_engines(Pause(on=True))
            if drop:
                for id in requests:
                    requests.fail(id, Failure(Reason.NOT_READY, "the worker is paused"))
            await self._said(paused=True)

    async def resume(self) -> None:
        async with self._turn:
            if self._life.state is State.READY:
                return
            self._check_paused()
            if self._broken:
                raise MillraceError(Reason.NOT_READY, f"load weights first: {self._broken}")
            self._tell_engines(Pause(on=False))
            self._life.to(State.READY)

    async def load(self, path: str, version: str) -> None:
        async with self._turn:
            self._check_paused()
            if not path:
                raise FieldError("path", "must name the folder of a checkpoint")
            version, path = _version(path, version), await self._below_root(path)
            if refused := await self._ranks.set_weights(SetWeights(path, version, check=True)):
                raise FieldError("path", f"{path} cannot be loaded: {refused}")
            await self._frontend.forget(f"weights {version} are being loaded")
            await self._said(paused=True)  # also the copies of cached pages
            await self._set(SetWeights(path, version))
            self._path = Path(path)

    async def sleep(self) -> None:
        async with self._turn:
            if not self._asleep:
                self._check_paused()
                await self._frontend.forget("the worker goes to sleep")
                await self._frontend.stop_ranks()
                self._asleep = True
                self._life.advance(State.PAUSED, "asleep")

    async def wake(self, path: str, version: str) -> None:
        """A rank that fails ends the worker, as at a start; ranks that take too long are stopped."""
        async with self._turn:
            if not self._asleep:
                self._check_paused()
                return
            if path:
                version = _version(path, version)
                self._path, self._frontend.version = Path(await self._below_root(path)), version
            try:
                await self._frontend.start_ranks(self._path)
                self._tell_engines(Pause(on=True))
                await self._said(paused=True)
            except Exception:  # also of a process that cannot be started: some ranks may be up already
                await self._frontend.stop_ranks()
                raise
            self._asleep, self._broken = False, ""
            self._life.advance(State.PAUSED, "")
            if self._frontend.version:
                await self._set(SetWeights("", self._frontend.version))

    async def _set(self, order: SetWeights) -> None:
        """Raises MillraceError when a rank could not; others may have the new weights by then."""
        self._broken = f"weights {order.version} are being loaded"
        self._life.advance(State.PAUSED, self._broken)
        if failed := await self._ranks.set_weights(order):
            self._broken = f"weights {order.version} were not loaded: {failed}"
            self._life.advance(State.PAUSED, self._broken)
            raise MillraceError(Reason.INTERNAL, self._broken)
        self._broken, self._frontend.version = "", order.version
        self._life.advance(State.PAUSED, "")
        log.info("the weights are version %s", order.version)
        self._frontend.show_version()

    def _tell_engines(self, message: Pause) -> None:
        for replica in range(self._frontend.config.dp):
            self._ranks.send(replica, message)

    async def _said(self, paused: bool) -> None:
        board, what = self._frontend.board, "the end of steps and copies" if paused else "the end of the pause before"
        async with within(self._frontend.config.timeouts.stall, what):
            while any(load.paused is not paused for load in board.loads):
                await board.changed.wait()

    async def _below_root(self, path: str) -> str:
        """The folder behind all links. Who may load weights reads no other folders of the host with it."""
        root = self._frontend.config.checkpoints
        try:
            real = await asyncio.to_thread(os.path.realpath, path)
            below = root is not None and Path(real).is_relative_to(await asyncio.to_thread(os.path.realpath, root))
        except ValueError:  # a zero byte
            below = False
        if not below:
            raise FieldError("path", f"{path} is not below weights_root, which is {root or 'not configured'}")
        return real

    def _check_paused(self) -> None:
        if self._life.state is not State.PAUSED:
            raise MillraceError(Reason.NOT_READY, f"the worker is {self._life.state}; pause it first")
        if self._asleep:
            raise MillraceError(Reason.NOT_READY, "the worker is asleep; wake it first")


def _version(path: str, given: str) -> str:
    if len(given) > LONGEST_VERSION:
        raise FieldError("version", f"has {len(given)} characters; at most {LONGEST_VERSION} are allowed")
    return given or Path(path).name
