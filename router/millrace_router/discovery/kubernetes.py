"""Workers of a Kubernetes cluster: list, then watch from the list's resource version.

    thread                                            event loop
    1. list                       ── objects ──▶      Store.replace, publish
    2. watch from its version     ── event ────▶      Store.apply, publish
    3. the server ends the watch: watch on from the version of its last event
    4. 410, any other error, silence, or Timing.relist since the last list: back to 1, after a pause unless it was due.
       After an error credentials are read afresh: a token, an authority or a kubeconfig may have been replaced

The thread talks to the API server only; its one state is a resource version.
"""

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kubernetes.watch import Watch

from millrace_router.config import KubernetesConfig
from millrace_router.discovery.base import Listener
from millrace_router.discovery.kube_api import List, answer_of, connect, explain, namespace_of, trouble
from millrace_router.discovery.objects import Object, Store

log = logging.getLogger(__name__)

SHORTEST_WATCH_S = 0.2  # a server that ends watches faster than this is faulty
PAGE = 500  # objects per answer to a list


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals in seconds."""

    watch: int = 240  # the server ends a watch after this, and the next one continues it
    silence: float = 120.0  # a connection without any byte for so long is dead: servers send bookmarks every minute
    connect: float = 5.0
    relist: float = 300.0  # between full lists, with or without a watch; +-10 %
    first_pause: float = 0.5  # after an error; doubles up to the longest
    longest_pause: float = 30.0  # a watch that has gone on for longer ends the doubling


class KubernetesSource:
    def __init__(self, config: KubernetesConfig, timing: Timing = Timing()) -> None:
        self._config = config
        self._timing = timing
        self._timeout = timing.connect, timing.silence  # to connect, and between two bytes
        self._store = Store(config)
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._loop: asyncio.AbstractEventLoop  # this and the next since `start`
        self._listener: Listener
        self._due = False  # publishing is scheduled: a burst of events is published once

    def start(self, listener: Listener) -> None:
        self._loop, self._listener = asyncio.get_running_loop(), listener
        threading.Thread(target=self._run, name="kubernetes-watch", daemon=True).start()

    async def stop(self) -> None:
        """End the thread as soon as its connection ends. The caller need not wait for it."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.stop()

    # ------------------------------------------------------------------------------------- on the event loop

    def _update(self, change: Callable[..., None], *arguments: object) -> None:
        change(*arguments)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._publish)

    def _publish(self) -> None:
        self._due = False
        if not self._stopped.is_set():
            self._listener.on_targets(self._store.targets())

    # ------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        config, timing, pause = self._config, self._timing, self._timing.first_pause
        call: List | None = None
        while not self._stopped.is_set():
            due, listed = time.monotonic() + timing.relist * random.uniform(0.9, 1.1), math.inf
            verb, namespace = "list", config.namespace
            try:
                namespace = namespace_of(config)
                call = call or connect(config)
                version = self._list(call)
                verb, listed = "watch", time.monotonic()
                while not self._stopped.is_set() and (left := due - time.monotonic()) > 0:
                    version = self._follow(call, version, left)
                pause = timing.first_pause
            except Exception as error:  # whatever it is, the answer is the same
                if self._stopped.is_set():
                    return
                call, kind = None, trouble(error)
                what = f"{verb} {config.objects} of namespace {namespace}"
                log.warning("cannot %s (%s), listing again: %s", what, kind, explain(error))
                self._tell(self._listener.on_trouble, kind)
                if time.monotonic() - listed > timing.longest_pause:
                    pause = timing.first_pause
                self._stopped.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, timing.longest_pause)

    def _list(self, call: List) -> str:
        """Pass on all objects. Returns the resource version to watch from."""
        objects: list[Object] = []
        following = None
        while True:
            answer = answer_of(call(limit=PAGE, _continue=following, _request_timeout=self._timeout))
            objects += answer["items"]
            following = answer["metadata"].get("continue")
            if not following:
                self._tell(self._update, self._store.replace, objects)
                return str(answer["metadata"]["resourceVersion"])

    def _follow(self, call: List, version: str, left_s: float) -> str:
        """Pass on the events of one watch until its regular end. Returns the version to continue from."""
        started = time.monotonic()
        self._watch = watch = Watch()
        events = watch.stream(
            call,
            resource_version=version,
            timeout_seconds=math.ceil(min(left_s, self._timing.watch)),
            allow_watch_bookmarks=True,
            _request_timeout=self._timeout,
        )
        with contextlib.closing(events):
            for event in events:
                if self._stopped.is_set():
                    return version
                if event is None:
                    raise ValueError("the watch sent something that is not JSON")
                version = event["object"]["metadata"]["resourceVersion"]
                self._tell(self._update, self._store.apply, event["type"], event["object"])
                if time.monotonic() - started > left_s:
                    return version  # due for a list, though the server has not ended the watch
        if time.monotonic() - started < SHORTEST_WATCH_S:
            raise ConnectionError("the watch ended at once")
        return version

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(callback, *arguments)
