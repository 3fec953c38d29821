"""An API server on loopback that stores what helm sends, so that a real helm can install, upgrade and roll back.

No controller runs, and nothing is checked but the data of immutable objects. A patch replaces lists whole.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
KINDS = {
    "v1": {"configmaps": "ConfigMap", "secrets": "Secret", "services": "Service", "serviceaccounts": "ServiceAccount"},
    "apps/v1": {"deployments": "Deployment"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}


class Store:
    """`url`, and `objects` by kind and name."""

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[tuple[str, str], Object] = {}
        self._version = 0

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Object) -> tuple[int, Object]:
        parts = path.strip("/").split("/")
        if parts == ["version"]:
            return 200, {"major": "1", "minor": "31", "gitVersion": "v1.31.0"}
        if parts in (["api"], ["apis"]):
            return 200, {"kind": "APIVersions", "versions": ["v1"]} if parts == ["api"] else _groups()
        version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        if version not in KINDS:
            return _refusal(404, "NotFound")
        if not rest:
            return 200, _resources(version)
        kind, name = KINDS[version][rest[2]], rest[3] if len(rest) > 3 else body.get("metadata", {}).get("name", "")
        if method == "GET" and not name:
            return 200, {"kind": f"{kind}List", "apiVersion": version, "items": self._listed(kind, query)}
        return self._one(method, (kind, name), body)

    def _one(self, method: str, key: tuple[str, str], body: Object) -> tuple[int, Object]:
        known = self.objects.get(key)
        if (known is None) is (method != "POST"):
            return _refusal(*((404, "NotFound") if known is None else (409, "AlreadyExists")))
        if method == "GET":
            return 200, known or {}
        if method == "DELETE":
            return 200, self.objects.pop(key)
        item = _patched(known or {}, body) if method == "PATCH" else body
        if known and known.get("immutable") and known.get("data") != item.get("data"):
            return _refusal(422, "Invalid")
        self._version += 1
        item["metadata"] |= {"resourceVersion": str(self._version)}
        self.objects[key] = item
        return 200, item

    def _listed(self, kind: str, query: dict[str, list[str]]) -> list[Object]:
        wanted = dict(term.split("=") for term in query.get("labelSelector", [""])[0].split(",") if term)
        found = (item for (its, _), item in self.objects.items() if its == kind)
        return [item for item in found if wanted.items() <= item["metadata"].get("labels", {}).items()]


def _groups() -> Object:
    named = [(version.split("/")[0], {"groupVersion": version, "version": "v1"}) for version in KINDS if "/" in version]
    groups = [{"name": name, "versions": [it], "preferredVersion": it} for name, it in named]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [{"name": n, "namespaced": True, "kind": k, "verbs": verbs} for n, k in KINDS[version].items()]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _refusal(status: int, reason: str) -> tuple[int, Object]:
    return status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}


def _patched(item: Object, patch: Object) -> Object:
    made = {key: value for key, value in item.items() if key not in patch}
    for key, value in patch.items():
        if value is not None:
            made[key] = _patched(item.get(key) or {}, value) if isinstance(value, dict) else value
    return made


@contextmanager
def serving() -> Iterator[Store]:
    store = Store()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            """Nothing is written."""

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            address = urlsplit(self.path)
            sent, status = b"", 200  # an empty document of OpenAPI, in protobuf: nothing is known of any kind
            if address.path != "/openapi/v2":
                item = json.loads(body) if body and self.command != "DELETE" else {}
                status, found = store.answer(self.command, address.path, parse_qs(address.query), item)
                sent = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if sent else "application/octet-stream")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        store.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
