"""Operators' HTTP: the same functions as the Admin service, on a port of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from millrace.v1 import admin_pb2
from millrace_router.admin import browser_guard
from millrace_router.fleet.hooks import Shared
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker
from router.harness import Cluster
from starlette.datastructures import Headers

JSON = {"content-type": "application/json"}
PATHS = ("/workers", "/warmup", "/freeze_gc", "/flush_cache", "/start_profile", "/stop_profile", "/drain/x")


@pytest.fixture
async def operate(cluster: Callable) -> AsyncIterator[Callable]:
    """`made, http = await operate(worker, …)`."""
    clients: list[httpx.AsyncClient] = []

    async def start(*workers: FakeWorker, **settings: object) -> tuple[Cluster, httpx.AsyncClient]:
        made = await cluster(*workers, **settings)
        url = f"http://127.0.0.1:{made.router.ports['admin_http']}"
        clients.append(httpx.AsyncClient(base_url=url, timeout=30, headers=JSON))
        return made, clients[-1]

    yield start
    for client in clients:
        await client.aclose()


async def ask(http: httpx.AsyncClient, path: str, **body: object) -> Any:
    answer = await http.post(path, json=body or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(answer: httpx.Response) -> tuple[int, str, str]:
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["message"]


async def test_workers_pairs_and_this_process(operate: Callable) -> None:
    made, http = await operate(FakeWorker(PREFILL), FakeWorker(DECODE))
    await made.until(lambda: made.router.registry.ready)
    seen = (await http.get("/workers")).json()
    prefill, decode = seen["workers"]
    assert [worker["info"]["role"] for worker in seen["workers"]] == ["ROLE_PREFILL", "ROLE_DECODE"]
    assert prefill["healthy"] and prefill["routable"] and not prefill["leaving"] and prefill["detail"] == ""
    assert prefill["key"] == prefill["address"] == made.prefills[0].address
    (pair,) = seen["pairs"]
    assert pair == {
        "source": prefill["address"],
        "worker": decode["address"],
        "state": "ready",
        "attempts": 1,
        "detail": "",
    }
    await made.until(lambda: made.metric("millrace_gc_freezes_total", process="router") == 2)
    router = (await http.get("/workers")).json()["router"]
    assert router["ready"] and router["gc_freezes"] == 2 and int(router["gc_frozen_objects"]) > 1000
    assert made.metric("millrace_gc_frozen_objects", process="router") == int(router["gc_frozen_objects"])
    assert made.metric("millrace_pairs", state="ready") == 1


async def test_the_drafts_of_workers(operate: Callable) -> None:
    made, http = await operate(FakeWorker(PREFILL), FakeWorker(DECODE))
    made.decodes[0].change(counts={"drafted": [10, 4], "accepted": [8, 1]})
    async with asyncio.timeout(120):
        while True:
            loads = [worker["load"]["replicas"][0] for worker in (await http.get("/workers")).json()["workers"]]
            if loads[1]["drafted"]:
                break
    assert [load["drafted"] for load in loads] == [[], ["10", "4"]]
    assert [load["accepted"] for load in loads] == [[], ["8", "1"]]


async def test_both_faces_do_the_same(operate: Callable) -> None:
    made, http = await operate(FakeWorker(PREFILL), FakeWorker(DECODE))
    assert await ask(http, "/warmup") == {"pairs": 1}
    assert (await ask(http, "/freeze_gc"))["processes"] == 5
    assert await ask(http, "/flush_cache") == {"pages": 14}
    assert (await made.admin.FlushCaches(admin_pb2.FlushCachesRequest())).pages == 14
    decode = made.decodes[0]
    assert await ask(http, "/start_profile", workers=[decode.address], max_seconds=5) == {"workers": [decode.address]}
    assert decode.profiling == 5
    assert await ask(http, "/stop_profile", workers=[decode.epoch]) == {
        "traces": [{"address": decode.address, "paths": ["/traces/rank0.json.gz"]}]
    }
    assert await ask(http, f"/drain/{decode.address}", timeout_s=1) == {"aborted": 0}
    assert decode.drained and not made.router.registry.ready
    assert (await http.get("/health")).status_code == 200


async def test_an_error_names_every_worker_that_failed(operate: Callable) -> None:
    made, http = await operate(FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE))
    made.decodes[1].profiling = 1.0
    answer = await http.post("/stop_profile")
    status, code, message = error(answer)
    assert (status, code) == (404, "not_found") and message.startswith("2 of 3 workers failed: ")
    assert made.prefills[0].address in message and made.decodes[0].address in message
    assert made.decodes[1].profiling is None, "those that could have done it"


async def test_a_worker_without_a_connection_is_one_of_those_that_failed(operate: Callable) -> None:
    made, http = await operate(FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE))
    here, gone = made.decodes
    await gone.stop()
    await made.until(lambda: made.router.registry.workers[gone.address].load is None)
    status, code, message = error(
        await http.post("/start_profile", json={"workers": [here.address, gone.address], "max_seconds": 5})
    )
    assert (status, code) == (503, "worker_lost")
    assert message.startswith(f"1 of 2 workers failed: {gone.address}: ")
    assert here.profiling == 5, "those that could have done it"


class Stuck(FakeWorker):
    """Its FreezeGc never ends, once `stuck` is set."""

    stuck = False

    async def FreezeGc(self, request, context):
        if self.stuck:
            self.silent = True
            await asyncio.Event().wait()
        return await super().FreezeGc(request, context)


@pytest.mark.parametrize("path", ["/freeze_gc", "/warmup"])
async def test_a_worker_that_is_lost_meanwhile_is_an_error(operate: Callable, path: str) -> None:
    made, http = await operate(Stuck(UNIFIED))
    made.workers[0].stuck = True
    status, code, _ = error(await http.post(path))
    assert (status, code) == (503, "worker_lost")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/drain/nowhere:1", b"", 404, "no worker at 'nowhere:1'"),
        ("/start_profile", b'{"worker": "a:1"}', 400, "StartProfilesRequest"),
        ("/drain/{worker}", b'{"timeout_s": -1}', 400, "timeout_s must be at least 0"),
        ("/start_profile", b"[]", 400, "StartProfilesRequest"),
        ("/start_profile", b'{"workers": ["\xff"]}', 400, "StartProfilesRequest"),
        ("/start_profile", b'{"workers": ' + b"[" * 5000, 400, "StartProfilesRequest"),
        ("/warmup", b"not JSON", 400, "WarmUpRequest in JSON"),
        ("/warmup", b" " * (65 << 10), 413, "the limit is 65536"),
        ("/nothing", b"", 404, "POST /nothing"),
        ("/workers", b"", 405, "POST /workers"),
    ],
)
async def test_bad_requests(operate: Callable, path: str, body: bytes, status: int, words: str) -> None:
    made, http = await operate(FakeWorker(UNIFIED))
    found, _, message = error(await http.post(path.format(worker=made.workers[0].address), content=body))
    assert found == status and words in message


POSTS = tuple(path for path in PATHS if path != "/workers")
FOREIGN = [  # headers, and the one that is named
    ({"host": "evil.example.com"}, "host"),
    ({"host": "evil.example.com:8001"}, "host"),
    ({"host": "127.0.0.1.evil.example.com"}, "host"),
    ({"host": "localhost.evil.example.com"}, "host"),
    ({"host": "svc"}, "host"),
    ({"host": "127.0.0.1@evil.example.com"}, "host"),
    ({"origin": "https://evil.example.com"}, "origin"),
    ({"origin": "http://localhost:3000"}, "origin"),
    ({"origin": "null"}, "origin"),
    ({"origin": ""}, "origin"),
]
OURS = ["127.0.0.1", "127.0.0.1:8001", "[::1]:8001", "10.0.0.7:8001", "localhost", "LocalHost:9", socket.gethostname()]
OURS += ["admin.localhost:1", "millrace-router-0.millrace-router-pods.ns.svc", "10-0-0-7.ns.pod.cluster.local:8001", ""]


@pytest.mark.parametrize(("headers", "named"), FOREIGN)
async def test_a_page_of_another_site_is_refused(operate: Callable, headers: dict[str, str], named: str) -> None:
    made, http = await operate(FakeWorker(UNIFIED))
    before = made.workers[0].freezes
    asked = [await http.post(path, headers=headers) for path in POSTS]
    asked += [await http.get(path, headers=headers) for path in ("/workers", "/explain/r-1")]
    for answer in asked:
        status, code, message = error(answer)
        assert (status, code) == (400, "invalid_argument") and message.startswith(f"the header {named} ")
    assert made.workers[0].freezes == before and not made.workers[0].drained
    assert (await http.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"]
)
async def test_what_a_form_can_send_is_refused(operate: Callable, kind: str | None) -> None:
    _, http = await operate(FakeWorker(UNIFIED))
    del http.headers["content-type"]
    for path in POSTS:
        status, _, message = error(await http.post(path, headers={"content-type": kind} if kind else {}))
        assert status == 400 and message.startswith("the header content-type must be application/json")


@pytest.mark.parametrize("host", OURS)
async def test_names_of_this_host_and_of_pods_are_served(operate: Callable, host: str) -> None:
    _, http = await operate(FakeWorker(UNIFIED))
    assert (await http.get("/workers", headers={"host": host})).status_code == 200
    own = {"host": host, "origin": f"http://{host}", "content-type": "Application/JSON; charset=utf-8"}
    assert (await http.post("/freeze_gc", headers=own)).status_code == 200


async def test_the_name_that_it_listens_on_is_served(operate: Callable) -> None:
    headers = {"host": "operators.example.com:1", **JSON}
    _, http = await operate(FakeWorker(UNIFIED))
    assert (await http.post("/freeze_gc", headers=headers)).status_code == 400
    browser_guard.check("POST", Headers(headers), ["operators.example.com"])


async def test_the_public_port_has_none_of_it(operate: Callable) -> None:
    made, _ = await operate(FakeWorker(UNIFIED))
    for path in PATHS:
        for method in ("GET", "POST"):
            assert (await made.http.request(method, path)).status_code == 404, path


async def test_a_pair_that_is_retried_is_visible(operate: Callable) -> None:
    decode = FakeWorker(DECODE)
    decode.warmup_failures.extend(["TRANSFER_FAILED"] * 3)
    made, http = await operate(FakeWorker(PREFILL), decode, wait=False)
    await made.until(lambda: made.metric("millrace_pairs", state="retrying") == 1, 30)
    await made.until(lambda: made.router.registry.ready, 30)
    (pair,) = (await http.get("/workers")).json()["pairs"]
    assert (pair["state"], pair["attempts"], pair["detail"]) == ("ready", 4, "")
    assert made.metric("millrace_pairs", state="retrying") == 0


async def test_the_routers_own_process_is_frozen_whenever_it_becomes_ready(operate: Callable) -> None:
    made, _ = await operate(FakeWorker(UNIFIED))
    await made.until(lambda: made.metric("millrace_gc_freezes_total", process="router") == 2)
    await made.workers[0].restart()
    await made.until(lambda: made.metric("millrace_gc_freezes_total", process="router") == 3, 30)
    assert made.workers[0].freezes == 2, "another epoch: the hooks have run again"


async def test_calls_that_overlap_share_the_next_run() -> None:
    shared, runs, gate = Shared(), 0, asyncio.Event()

    async def run() -> None:
        nonlocal runs
        runs += 1
        await gate.wait()

    calls = [asyncio.create_task(shared.run(run)) for _ in range(2)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(shared.run(run)) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls, *late)
    assert runs == 2, "the first began before the others asked"


async def test_a_failed_run_is_one_callers_failure() -> None:
    shared, outcomes = Shared(), [OSError("scripted"), None]

    async def run() -> None:
        if outcome := outcomes.pop(0):
            raise outcome

    results = await asyncio.gather(*(shared.run(run) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [OSError, type(None)] and outcomes == []
