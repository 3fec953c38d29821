"""Workers of a Kubernetes cluster: list, then watch from the list's resource version.

    thread                                            event loop
    1. list                       ── objects ──▶      Store.replace, publish
    2. watch from its version     ── event ────▶      Store.apply, publish
    3. the server ends the watch: watch on from the version of its last event
    4. 410, any other error, silence, or relist_s since the last list: back to 1, after a pause unless it was due

The thread talks to the API server only, decides nothing and keeps nothing but a resource version; what was missed
while no watch ran comes out of comparing the next list. An error removes nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client
from kubernetes import config as credentials
from kubernetes.client.exceptions import ApiException
from kubernetes.watch import Watch

from millrace_router.discovery.base import Listener
from millrace_router.discovery.config import KubernetesConfig
from millrace_router.discovery.objects import Object, Store

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
SHORTEST_WATCH_S = 0.2  # a server that ends watches faster than this is in trouble
PAGE = 500  # objects per answer to a list
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
List = Callable[..., Any]


class KubernetesSource:
    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._store = Store(config)
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._due = False  # publishing is on its way: a burst of events is told once

    def start(self, listener: Listener) -> None:
        self._loop, self._listener = asyncio.get_running_loop(), listener
        threading.Thread(target=self._run, name="kubernetes-watch", daemon=True).start()

    async def stop(self) -> None:
        """The thread ends as soon as its connection does; nobody has to wait for it."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.stop()

    # ------------------------------------------------------------------------------------- on the event loop

    def _on_list(self, objects: list[Object]) -> None:
        self._store.replace(objects)
        self._publish_soon()

    def _on_event(self, kind: str, item: Object) -> None:
        self._store.apply(kind, item)
        self._publish_soon()

    def _publish_soon(self) -> None:
        if not self._due and self._loop is not None:
            self._due = True
            self._loop.call_soon(self._publish)

    def _publish(self) -> None:
        self._due = False
        if self._listener is not None and not self._stopped.is_set():
            self._listener.on_targets(self._store.targets())

    def _on_trouble(self, kind: str) -> None:
        if self._listener is not None and not self._stopped.is_set():
            self._listener.on_trouble(kind)

    # ------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        config, pause = self._config, self._config.backoff_s
        call: List | None = None
        while not self._stopped.is_set():
            due = time.monotonic() + config.relist_s * random.uniform(0.9, 1.1)
            try:
                call = call or connect(config)
                version = self._list(call)
                pause = config.backoff_s
                while not self._stopped.is_set() and (left := due - time.monotonic()) > 0:
                    version = self._follow(call, version, left)
            except Exception as error:  # whatever it is, the answer is the same
                if self._stopped.is_set():
                    return
                kind = trouble(error)
                log.warning("watching %s failed (%s), listing again: %s", config.objects, kind, error)
                self._tell(self._on_trouble, kind)
                self._stopped.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _list(self, call: List) -> str:
        """Hand over all objects; the resource version to watch from."""
        objects: list[Object] = []
        following = None
        while True:
            answer = _answer(call(limit=PAGE, _continue=following, _request_timeout=self._timeout()))
            objects += answer["items"]
            following = answer["metadata"].get("continue")
            if not following:
                self._tell(self._on_list, objects)
                return str(answer["metadata"]["resourceVersion"])

    def _follow(self, call: List, version: str, left_s: float) -> str:
        """Hand over the events of one watch until its regular end; the version to go on from."""
        started = time.monotonic()
        self._watch = watch = Watch()
        events = watch.stream(
            call,
            resource_version=version,
            timeout_seconds=math.ceil(min(left_s, self._config.watch_s)),
            allow_watch_bookmarks=True,
            _request_timeout=self._timeout(),
        )
        with contextlib.closing(events):
            for event in events:
                if self._stopped.is_set():
                    return version
                if event is None:
                    raise ValueError("the watch sent something that is not JSON")
                version = event["object"]["metadata"]["resourceVersion"]
                self._tell(self._on_event, event["type"], event["object"])
                if time.monotonic() - started > left_s:
                    return version  # due for a list, though the server has not ended the watch
        if time.monotonic() - started < SHORTEST_WATCH_S:
            raise ConnectionError("the watch ended at once")
        return version

    def _timeout(self) -> tuple[float, float]:
        """To connect, and between two bytes."""
        return self._config.connect_s, self._config.silence_s

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(callback, *arguments)


def connect(config: KubernetesConfig) -> List:
    """The call that lists or watches what the configuration names, as plain JSON: typed models cost a hundred times
    more, and what we read is little. Raises when there are no credentials.
    """
    configuration = client.Configuration()
    if config.api:
        configuration.host = config.api
    elif config.kubeconfig is not None:
        credentials.load_kube_config(str(config.kubeconfig), config.context or None, configuration)
    else:
        credentials.load_incluster_config(configuration)
    configuration.retries = False  # by us, who know what has to be told then
    api = client.ApiClient(configuration)
    namespace = config.namespace or own_namespace()
    if config.objects == "pods":
        method: List = client.CoreV1Api(api).list_namespaced_pod
    else:
        method = client.DiscoveryV1Api(api).list_namespaced_endpoint_slice

    def call(**options: Any):  # type: ignore[no-untyped-def]  # an annotation would make Watch build models
        return method(namespace, label_selector=config.selector, **{"_preload_content": False, **options})

    return call


def own_namespace() -> str:
    return OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"


def trouble(error: Exception) -> str:
    """One of base.TROUBLES."""
    if isinstance(error, ApiException) and error.status:
        return "gone" if error.status == HTTPStatus.GONE else "refused"
    refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # which counts as a timeout there
    return "silent" if isinstance(error, urllib3.exceptions.TimeoutError) and not refused else "failed"


def _answer(response: Any) -> Object:
    """The body of an answer to a list."""
    if response.status != HTTPStatus.OK:
        raise ApiException(status=response.status, reason=f"{response.reason}: {response.data[:200]!r}")
    answer: Object = json.loads(response.data)
    return answer
