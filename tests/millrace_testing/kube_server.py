"""A scripted Kubernetes API server on loopback: list and watch of Pods and EndpointSlices of one namespace.

It keeps a history of events, so that a watch continues from any resource version since `forget`; what is older is 410
Gone. Faults: `refuse` (a status for every request), `drop_watches`, `silent` (connections stay open, nothing is sent).
With `tls` it speaks https; `token` is the bearer token that it asks for, and may be replaced at any time.
"""

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Object = dict[str, Any]
NAMESPACE, LABELS = "default", {"app": "millrace"}
_numbers = itertools.count(1)


def pod(name: str, address: str, ready: bool = True, **labels: str) -> Object:
    """A running pod, with a UID of its own, whose container port "grpc" is at `address`. `labels` begin "millrace/"."""
    ip, _, port = address.rpartition(":")
    number = next(_numbers)
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{number}",
            "creationTimestamp": f"2026-01-01T00:00:00.{number:06d}Z",
            "labels": LABELS | {f"millrace/{key}": value for key, value in labels.items()},
        },
        "spec": {"nodeName": "node-1", "containers": [{"ports": [{"name": "grpc", "containerPort": int(port)}]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": str(ready), "reason": "Scripted"}],
        },
    }


def endpoint_slice(name: str, port: int, *endpoints: Object) -> Object:
    meta = {"name": name, "uid": f"uid-{next(_numbers)}", "creationTimestamp": "", "labels": LABELS}
    return {"metadata": meta, "ports": [{"name": "grpc", "port": port}], "endpoints": list(endpoints)}


def endpoint(ip: str, uid: str, ready: bool = True, **conditions: bool) -> Object:
    target = {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}
    return {
        "addresses": [ip],
        "conditions": {"ready": ready, **conditions},
        "targetRef": target,
        "nodeName": "node-1",
        "zone": "zone-a",
    }


class KubeServer:
    """`async with KubeServer() as server`: then `server.url`."""

    def __init__(self, tls: dict[str, object] | None = None) -> None:
        """`tls` as Authority.tls() returns it."""
        self.url = ""
        self.token = ""
        self.lists = 0
        self.watches = 0  # begun
        self.open_watches = 0
        self.refuse = 0  # an HTTP status
        self.silent = False
        self.gone_as_event = True  # else as a status
        self._tls = tls
        self._objects: dict[str, Object] = {}
        self._version = 100
        self._history: list[tuple[int, str, Object]] = []
        self._oldest = 100
        self._drops = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        routes = [
            Route(f"/api/v1/namespaces/{NAMESPACE}/pods", self._serve),
            Route(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", self._serve),
        ]
        files = {"ssl_certfile": self._tls["cert"], "ssl_keyfile": self._tls["key"]} if self._tls else {}
        settings = {"log_config": None, "lifespan": "off", "timeout_graceful_shutdown": 1, **files}
        config = uvicorn.Config(Starlette(routes=routes), **settings)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        self._uvicorn = _Uvicorn(config)
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        return self

    async def __aexit__(self, *error: object) -> None:
        self.silent, self._uvicorn.should_exit = False, True
        self.drop_watches()
        await self._task

    # ------------------------------------------------------------------------------------- the script

    def put(self, item: Object) -> None:
        uid = item["metadata"]["uid"]
        self._event("MODIFIED" if uid in self._objects else "ADDED", item)
        self._objects[uid] = item

    def delete(self, item: Object) -> None:
        del self._objects[item["metadata"]["uid"]]
        self._event("DELETED", item)

    def forget(self) -> None:
        """What has happened until now can no longer be watched."""
        self._oldest = self._version
        self._history.clear()

    def drop_watches(self) -> None:
        self._drops += 1
        self._wake()

    def _event(self, kind: str, item: Object) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, json.loads(json.dumps(item))))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------------------------- HTTP

    async def _serve(self, request: Request) -> Response:
        query = request.query_params
        watch = query.get("watch") in ("true", "True")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self.token and (scheme.lower(), token) != ("bearer", self.token):
            return _refusal(401, "Unauthorized")
        if self.refuse:
            what = f'"{"watch" if watch else "list"}" resource "{request.url.path.rpartition("/")[2]}"'
            return _refusal(self.refuse, f"forbidden: User cannot {what}" if self.refuse == 403 else "scripted")
        if not watch:
            self.lists += 1
            items = [item for item in self._objects.values() if _selected(item, query.get("labelSelector", ""))]
            return self._page(items, int(query.get("limit", 0)) or len(items), int(query.get("continue") or 0))
        version = int(query["resourceVersion"])
        self.watches += 1
        if version < self._oldest and not self.gone_as_event:
            return _refusal(410, "too old")
        events = self._watch(version, float(query["timeoutSeconds"]), query.get("labelSelector", ""))
        return StreamingResponse(events, media_type="application/json")

    def _page(self, items: list[Object], limit: int, start: int) -> Response:
        rest = start + limit < len(items)
        meta = {"resourceVersion": str(self._version), "continue": str(start + limit) if rest else ""}
        return JSONResponse({"metadata": meta, "items": items[start : start + limit]})

    async def _watch(self, version: int, seconds: float, selector: str) -> AsyncIterator[bytes]:
        drops, self.open_watches = self._drops, self.open_watches + 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self._drops == drops and not self._uvicorn.should_exit:
                        changed = self._changed
                        if version < self._oldest and self.gone_as_event:
                            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                            yield _line("ERROR", gone)
                            return
                        for number, kind, item in [] if self.silent else list(self._history):
                            if number > version and (kind == "BOOKMARK" or _selected(item, selector)):
                                yield _line(kind, item)
                            version = max(version, number)
                        await changed.wait()
        finally:
            self.open_watches -= 1


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"kind": "Status", "code": status, "message": message}, status)


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _selected(item: Object, selector: str) -> bool:
    wanted = dict(term.split("=", 1) for term in selector.split(",") if term)
    return wanted.items() <= item["metadata"]["labels"].items()
