"""Discovery in Kubernetes, against a scripted API server over HTTP."""

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from millrace_router.config import KubernetesConfig
from millrace_router.discovery import kube_api, kubernetes
from millrace_router.discovery.kube_api import explain
from millrace_router.discovery.kubernetes import KubernetesSource, Timing
from millrace_testing.certificates import Authority
from millrace_testing.hasty import hasty_servers
from millrace_testing.kube_server import KubeServer, pod
from router.discovery.test_discovery import Heard
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected
from router.harness import Cluster, states, until

FAST = Timing(first_pause=0.02, silence=20.0)
SELECTOR = "app=millrace"


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeServer]:
    hasty_servers(monkeypatch)
    async with KubeServer() as server:
        yield server


@pytest.fixture
async def listen() -> AsyncIterator[Callable]:
    """`listen(Timing(…), selector=…, …)`: a listener of a started source."""
    async with contextlib.AsyncExitStack() as stack:

        def start(timing: Timing = FAST, **values: object) -> Heard:
            source, heard = KubernetesSource(KubernetesConfig(**values), timing), Heard()
            source.start(heard)
            stack.push_async_callback(source.stop)
            return heard

        yield start


@pytest.fixture
def hear(server: KubeServer, listen: Callable) -> Callable:
    return functools.partial(listen, selector=SELECTOR, api=server.url)


async def test_list_then_watch(server: KubeServer, hear: Callable) -> None:
    first, second = pod("a", "10.0.0.1:1"), pod("b", "10.0.0.2:1")
    foreign = pod("c", "10.0.0.3:1")
    foreign["metadata"]["labels"] = {"app": "other"}
    follower = pod("d", "10.0.0.4:1")
    follower["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = "3"
    for item in (first, foreign, follower):
        server.put(item)
    heard = hear()
    await heard.until(lambda: heard.addresses == ["10.0.0.1:1"])
    await until(lambda: server.open_watches == 1)
    server.put(second)
    await heard.until(lambda: heard.addresses == ["10.0.0.1:1", "10.0.0.2:1"])
    server.delete(first)
    await heard.until(lambda: heard.addresses == ["10.0.0.2:1"])
    assert server.lists == 1 and not heard.troubles


async def test_deletes_missed_while_the_watch_was_down(server: KubeServer, hear: Callable) -> None:
    gone, stays = pod("a", "10.0.0.1:1"), pod("b", "10.0.0.2:1")
    server.put(gone)
    server.put(stays)
    heard = hear()
    await heard.until(lambda: len(heard.targets) == 2)
    await until(lambda: server.open_watches == 1)
    server.refuse = 503
    server.drop_watches()
    await heard.until(lambda: "refused" in heard.troubles)
    assert len(heard.targets) == 2, "an outage removes nobody"
    server.delete(gone)
    server.forget()
    server.refuse = 0
    await heard.until(lambda: heard.addresses == ["10.0.0.2:1"])


@pytest.mark.parametrize("as_event", [True, False])
async def test_gone_leads_to_another_list(server: KubeServer, hear: Callable, as_event: bool) -> None:
    """As an event of a running watch, or as the answer to the next one."""
    server.gone_as_event = as_event
    first, second = pod("a", "10.0.0.1:1"), pod("b", "10.0.0.2:1")
    server.put(first)
    heard = hear(replace(FAST, watch=1))
    await heard.until(lambda: len(heard.targets) == 1)
    await until(lambda: server.open_watches == 1)
    server.delete(first)
    server.put(second)
    server.forget()  # before the watch could tell
    await heard.until(lambda: heard.addresses == ["10.0.0.2:1"])
    assert "gone" in heard.troubles


class Waits(threading.Event):
    """Notes the pauses instead of waiting, and is set after so many."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        if len(self.pauses) == self._count:
            self.set()
        return self.is_set()


@pytest.mark.parametrize("lasted_s", [0.0, 31.0])
def test_a_watch_that_fails_behind_every_list_is_tried_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, lasted_s: float
) -> None:
    """As where a role may list and not watch: each try costs a whole list. A watch that has gone on is no such one."""
    now, source = [1000.0], KubernetesSource(KubernetesConfig(selector=SELECTOR, api="http://127.0.0.1:1"))
    monkeypatch.setattr(kubernetes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waits = Waits(9)
    source._listener, source._stopped = Heard(), waits
    source._tell = lambda *_: None
    source._list = lambda call: "100"

    def follow(call: object, version: str, left_s: float) -> str:
        now[0] += lasted_s
        raise ConnectionError("forbidden")

    source._follow = follow
    source._run()
    doubled = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    for pause, longest in zip(waits.pauses, [0.5] * 9 if lasted_s else doubled, strict=True):
        assert longest / 2 <= pause <= longest


async def test_a_broken_namespace_file(server: KubeServer, hear: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has too many files open for a while: nobody would start another thread."""
    faults = [OSError(errno.EMFILE, "too many open files")] * 2
    file = Mock(**{"read_text.side_effect": itertools.chain(faults, itertools.repeat("default"))})
    monkeypatch.setattr(kube_api, "OWN_NAMESPACE", file)
    server.put(pod("a", "10.0.0.1:1"))
    heard = hear()
    await heard.until(lambda: heard.addresses == ["10.0.0.1:1"])
    assert heard.troubles == ["failed"] * 2


async def test_a_dropped_watch_goes_on_where_it_was(server: KubeServer, hear: Callable) -> None:
    first, second = pod("a", "10.0.0.1:1"), pod("b", "10.0.0.2:1")
    heard = hear(replace(FAST, watch=1))
    await heard.until(lambda: heard.times)
    await until(lambda: server.open_watches == 1)
    server.put(first)
    await heard.until(lambda: len(heard.targets) == 1)
    await until(lambda: server.watches >= 2)  # the server has ended the first
    server.put(second)
    await heard.until(lambda: len(heard.targets) == 2)
    assert server.lists == 1


@pytest.mark.parametrize(("limits", "noticed"), [({"silence": 0.3}, True), ({"relist": 1.0}, False)])
async def test_a_watch_that_says_nothing_hides_no_change(
    server: KubeServer, hear: Callable, limits: dict[str, float], noticed: bool
) -> None:
    """Of a half-open connection, and of one that looks alive: there is a full list from time to time."""
    item = pod("a", "10.0.0.1:1")
    server.put(item)
    heard = hear(replace(FAST, **limits))
    await heard.until(lambda: len(heard.targets) == 1)
    await until(lambda: server.open_watches >= 1)
    server.silent = True
    server.delete(item)
    await heard.until(lambda: not heard.targets)
    assert ("silent" in heard.troubles) is noticed


async def test_a_burst_of_pods(server: KubeServer, hear: Callable) -> None:
    heard = hear()
    await heard.until(lambda: heard.times)
    items = [pod(f"w-{i}", f"10.0.{i // 250}.{i % 250}:1") for i in range(200)]
    for item in items:
        server.put(item)
    await heard.until(lambda: len(heard.targets) == 200)
    for item in items[:150]:
        server.delete(item)
    await heard.until(lambda: len(heard.targets) == 50)
    assert heard.times < 350, "events are told together"


async def test_lists_come_in_pages(server: KubeServer, hear: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_router.discovery.kubernetes.PAGE", 2)
    for i in range(5):
        server.put(pod(f"w-{i}", f"10.0.0.{i}:1"))
    heard = hear()
    await heard.until(lambda: len(heard.targets) == 5)
    assert server.lists == 3


# ----------------------------------------------------------------------------------------- with workers


@pytest.fixture
async def found(cluster: Callable, server: KubeServer) -> AsyncIterator[Callable]:
    """`await found(worker, …)`: a router that finds these workers in Kubernetes; with the pods."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*workers: FakeWorker) -> tuple[Cluster, list]:
            pods = []
            for i, worker in enumerate(workers):
                await worker.start()
                stack.push_async_callback(worker.stop)
                pods.append(pod(f"worker-{i}", worker.address))
                server.put(pods[-1])
            kubernetes = {"selector": SELECTOR, "api": server.url}
            made = await cluster(discovery={"kind": "kubernetes", "kubernetes": kubernetes}, wait=False)
            made.workers = list(workers)
            await made.until(lambda: made.router.registry.ready)
            return made, pods

        yield start


async def test_readiness_flips_and_the_link_stays(found: Callable, server: KubeServer) -> None:
    made, (_, decode) = await found(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.02))
    assert states(made, "decode") == states(made, "prefill") == [1, 1, 1]
    task = asyncio.create_task(made.generate([1]))
    await made.until(lambda: bool(made.workers[1].active))
    links = [worker.link for worker in made.router.registry.workers.values()]
    decode["status"]["conditions"][0]["status"] = "False"
    server.put(decode)
    await made.until(lambda: not made.router.registry.ready)
    assert states(made, "decode") == [1, 1, 0] and states(made, "prefill") == [1, 1, 0]
    assert (await task).tokens() == expected([1], 8), "running requests go on"
    warmups = len(made.workers[1].warmups)
    decode["status"]["conditions"][0]["status"] = "True"
    server.put(decode)
    await made.until(lambda: made.router.registry.ready)
    assert [worker.link for worker in made.router.registry.workers.values()] == links
    assert len(made.workers[1].warmups) == warmups, "the process is the same: it need not be warmed again"


async def test_a_removed_worker_finishes_what_it_has(found: Callable, server: KubeServer) -> None:
    made, (_, first, second) = await found(FakeWorker(PREFILL), *(FakeWorker(DECODE, step_s=0.05) for _ in range(2)))
    await made.until(lambda: len(made.router.registry.warmups.ready) == 2)
    task = asyncio.create_task(made.generate([1]))
    await made.until(lambda: any(worker.active for worker in made.decodes))
    busy = made.decodes.index(next(worker for worker in made.decodes if worker.active))
    server.delete((first, second)[busy])
    await made.until(lambda: len(made.router.registry.workers) == 2)
    leaving = next(status for status in made.router.registry.status() if status.leaving)
    assert leaving.in_flight == 1 and leaving.detail == "no longer discovered"
    assert (await task).tokens() == expected([1], 8)
    await made.until(lambda: len(made.router.registry.status()) == 2 and not made.decodes[busy].links)
    assert (await made.generate([2])).tokens() == expected([2], 8)
    assert len(made.decodes[busy].submitted) == 1


async def test_a_new_pod_at_an_old_address(found: Callable, server: KubeServer) -> None:
    made, (_, decode) = await found(FakeWorker(PREFILL), FakeWorker(DECODE))
    server.delete(decode)
    await made.until(lambda: not made.router.registry.ready)
    await made.workers[1].restart()
    again = pod("worker-1", made.workers[1].address)
    server.put(again)
    await made.until(lambda: made.router.registry.ready)
    status = next(s for s in made.router.registry.status() if s.address == made.workers[1].address)
    assert status.key == again["metadata"]["uid"] != decode["metadata"]["uid"] and status.name == "worker-1"
    assert (await made.generate([1])).tokens() == expected([1], 8)


async def test_losing_everything_is_noticed(found: Callable, server: KubeServer) -> None:
    made, pods = await found(FakeWorker(PREFILL), FakeWorker(DECODE))
    for item in pods:
        server.delete(item)
    await made.until(lambda: not made.router.registry.workers)
    assert (await made.http.get("/ready")).status_code == 503
    assert states(made, "prefill") == states(made, "decode") == [0, 0, 0]
    assert made.metric("millrace_discovery_changes_total", change="removed") == 2


# ------------------------------------------------------------------------------------- credentials


FIRST, SECOND = "first-secret-token", "second-secret-token"
PODS = {"selector": "app=millrace", "namespace": "default"}


@dataclass
class RankSetup:
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
async def tls_server(tmp_path: Path) -> AsyncIterator[KubeServer]:
    async with KubeServer(Authority().tls(tmp_path / "tls")) as server:
        server.token = FIRST
        yield server


@pytest.fixture(params=["kubeconfig", "service account"])
def site(
    request: pytest.FixtureRequest, tls_server: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RankSetup:
    found = RankSetup(tls_server, tmp_path / "token", tmp_path / "tls" / "ca.crt")
    if request.param == "kubeconfig":
        found.rotate(FIRST + "\n")  # written by a person, whose editor ends lines
        found.settings["kubeconfig"] = write_kubeconfig(tmp_path, tls_server.url, found)
    else:
        found.rotate(FIRST)
        host, _, port = tls_server.url.removeprefix("https://").rpartition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(found.token))
        monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(found.ca))
    return found


def write_kubeconfig(folder: Path, url: str, site: RankSetup) -> Path:
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
def hear_site(site: RankSetup, listen: Callable) -> Callable:
    return functools.partial(listen, **PODS, **site.settings)


async def test_a_rotated_token_needs_no_restart(
    site: RankSetup, hear_site: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    server = site.server
    server.put(pod("a", "10.0.0.1:1"))
    heard = hear_site()
    await heard.until(lambda: len(heard.targets) == 1)
    assert not heard.troubles
    await until(lambda: server.open_watches == 1)
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
    site: RankSetup, hear_site: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = site.ca.read_bytes()
    Authority().tls(tmp_path / "tls")  # the server has loaded its own before
    site.server.put(pod("a", "10.0.0.1:1"))
    heard = hear_site()
    await heard.until(lambda: len(heard.troubles) > 1)
    assert set(heard.troubles) == {"untrusted"} and not heard.times
    assert "cannot list pods of namespace default (untrusted)" in caplog.text
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    site.ca.write_bytes(right)
    await heard.until(lambda: len(heard.targets) == 1)


async def test_a_role_that_allows_too_little(
    site: RankSetup, hear_site: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    site.server.refuse = 403
    heard = hear_site()
    await heard.until(lambda: len(heard.troubles) > 1)
    assert set(heard.troubles) == {"refused"} and not heard.times
    line = next(record.getMessage() for record in caplog.records if "cannot list" in record.getMessage())
    assert "\n" not in line and "list pods of namespace default (refused)" in line
    assert '403 Forbidden: forbidden: User cannot "list" resource "pods"' in line


async def test_a_token_that_no_header_can_hold(
    site: RankSetup, hear_site: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    site.rotate(f"{FIRST}\n{SECOND}\n")
    heard = hear_site()
    await heard.until(lambda: "failed" in heard.troubles)
    assert "the bearer token is not one line of text" in caplog.text and "secret-token" not in caplog.text
    site.rotate(FIRST)
    await heard.until(lambda: heard.times)


async def test_stopping_ends_a_watch_over_tls(site: RankSetup) -> None:
    source, heard = KubernetesSource(KubernetesConfig(**PODS, **site.settings), FAST), Heard()
    source.start(heard)
    watching = next(thread for thread in threading.enumerate() if thread.name == "kubernetes-watch")
    site.server.put(pod("a", "10.0.0.1:1"))
    await heard.until(lambda: len(heard.targets) == 1)
    await until(lambda: site.server.open_watches == 1)
    site.server.put(pod("b", "10.0.0.2:1"))
    await heard.until(lambda: len(heard.targets) == 2)  # the watch has answered
    await source.stop()
    await until(lambda: not watching.is_alive())


def test_an_error_answer_without_a_message() -> None:
    """As a proxy in front of the API server gives."""
    assert explain(ApiException(status=502, reason="Bad Gateway", body="<html>")) == "502 Bad Gateway"
    assert explain(ApiException(status=410, reason="Expired:\ntoo old")) == "410 Expired: too old"
    assert explain(ConnectionError("the watch ended at once")) == "ConnectionError: the watch ended at once"
