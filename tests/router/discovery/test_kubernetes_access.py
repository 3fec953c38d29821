"""Discovery at an API server as clusters have it: https, and a bearer token that is replaced while the router runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from millrace_router.config import KubernetesConfig
from millrace_router.discovery.kube_api import explain
from millrace_router.discovery.kubernetes import KubernetesSource, Timing
from millrace_testing.certificates import Authority
from millrace_testing.kube_server import KubeServer, pod
from router.discovery.test_discovery import Heard

FIRST, SECOND = "first-secret-token", "second-secret-token"
FAST = Timing(first_pause=0.02, silence=20.0)
PODS = {"selector": "app=millrace", "namespace": "default"}


@dataclass
class Site:
    """An API server and the files with which a router may talk to it."""

    server: KubeServer
    token: Path
    ca: Path
    settings: dict[str, object] = field(default_factory=dict)

    def rotate(self, token: str) -> None:
        """As the kubelet does: another file takes the place of the old one."""
        draft = self.token.with_suffix(".new")
        draft.write_text(token)
        os.replace(draft, self.token)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KubeServer]:
    async with KubeServer(Authority().tls(tmp_path / "tls")) as server:
        server.token = FIRST
        yield server


@pytest.fixture(params=["kubeconfig", "service account"])
def site(request: pytest.FixtureRequest, server: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    found = Site(server, tmp_path / "token", tmp_path / "tls" / "ca.crt")
    if request.param == "kubeconfig":
        found.rotate(FIRST + "\n")  # written by a person, whose editor ends lines
        found.settings["kubeconfig"] = write_kubeconfig(tmp_path, server.url, found)
    else:
        found.rotate(FIRST)
        host, _, port = server.url.removeprefix("https://").rpartition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(found.token))
        monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(found.ca))
    return found


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def write_kubeconfig(folder: Path, url: str, site: Site) -> Path:
    path = folder / "kubeconfig"
    content = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "here", "user": "router"}}],
        "clusters": [{"name": "here", "cluster": {"server": url, "certificate-authority": str(site.ca)}}],
        "users": [{"name": "router", "user": {"tokenFile": str(site.token)}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
async def hear(site: Site) -> AsyncIterator[Callable]:
    """`hear()`: a listener of a started source."""
    async with contextlib.AsyncExitStack() as stack:

        def start() -> Heard:
            source, heard = KubernetesSource(KubernetesConfig(**PODS, **site.settings), FAST), Heard()
            source.start(heard)
            stack.push_async_callback(source.stop)
            return heard

        yield start


async def test_a_rotated_token_needs_no_restart(site: Site, hear: Callable, caplog: pytest.LogCaptureFixture) -> None:
    server = site.server
    server.put(pod("a", "10.0.0.1:1"))
    heard = hear()
    await heard.until(lambda: len(heard.targets) == 1)
    assert not heard.troubles
    await settled(lambda: server.open_watches == 1)
    server.token = SECOND  # the old one has expired before the new one is in the file
    server.drop_watches()
    await heard.until(lambda: "refused" in heard.troubles)
    assert len(heard.targets) == 1, "an outage removes nobody"
    site.rotate(SECOND)
    server.put(pod("b", "10.0.0.2:1"))
    await heard.until(lambda: len(heard.targets) == 2)
    assert set(heard.troubles) <= {"refused", "failed"}  # the second when the watch was dropped as soon as it began
    assert "pods of namespace default (refused), listing again: 401 Unauthorized" in caplog.text
    assert "secret-token" not in caplog.text


async def test_an_authority_that_is_not_the_server_s(
    site: Site, hear: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = site.ca.read_bytes()
    Authority().tls(tmp_path / "tls")  # the server has loaded its own before
    site.server.put(pod("a", "10.0.0.1:1"))
    heard = hear()
    await heard.until(lambda: len(heard.troubles) > 1)
    assert set(heard.troubles) == {"untrusted"} and not heard.times
    assert "cannot list pods of namespace default (untrusted)" in caplog.text
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    site.ca.write_bytes(right)
    await heard.until(lambda: len(heard.targets) == 1)


async def test_a_role_that_allows_too_little(site: Site, hear: Callable, caplog: pytest.LogCaptureFixture) -> None:
    site.server.refuse = 403
    heard = hear()
    await heard.until(lambda: len(heard.troubles) > 1)
    assert set(heard.troubles) == {"refused"} and not heard.times
    line = next(record.getMessage() for record in caplog.records if "cannot list" in record.getMessage())
    assert "\n" not in line and "list pods of namespace default (refused)" in line
    assert '403 Forbidden: forbidden: User cannot "list" resource "pods"' in line


async def test_a_token_that_no_header_can_hold(site: Site, hear: Callable, caplog: pytest.LogCaptureFixture) -> None:
    site.rotate(f"{FIRST}\n{SECOND}\n")
    heard = hear()
    await heard.until(lambda: "failed" in heard.troubles)
    assert "the bearer token is not one line of text" in caplog.text and "secret-token" not in caplog.text
    site.rotate(FIRST)
    await heard.until(lambda: heard.times)


async def test_stopping_ends_a_watch_over_tls(site: Site) -> None:
    source, heard = KubernetesSource(KubernetesConfig(**PODS, **site.settings), FAST), Heard()
    source.start(heard)
    watching = next(thread for thread in threading.enumerate() if thread.name == "kubernetes-watch")
    site.server.put(pod("a", "10.0.0.1:1"))
    await heard.until(lambda: len(heard.targets) == 1)
    await settled(lambda: site.server.open_watches == 1)
    site.server.put(pod("b", "10.0.0.2:1"))
    await heard.until(lambda: len(heard.targets) == 2)  # the watch has answered
    await source.stop()
    await settled(lambda: not watching.is_alive())


def test_an_error_answer_without_a_message() -> None:
    """As a proxy in front of the API server gives."""
    assert explain(ApiException(status=502, reason="Bad Gateway", body="<html>")) == "502 Bad Gateway"
    assert explain(ApiException(status=410, reason="Expired:\ntoo old")) == "410 Expired: too old"
    assert explain(ConnectionError("the watch ended at once")) == "ConnectionError: the watch ended at once"
