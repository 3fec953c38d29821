"""The operators' HTTP port: the functions of the Admin service, and the page with the traffic that it shows."""

import asyncio
import math
import re
import socket
from collections.abc import AsyncIterator, Callable
from itertools import chain, repeat
from typing import Any
from unittest.mock import DEFAULT, AsyncMock, Mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import admin_pb2
from millrace_common.reasons import Reason
from millrace_router.admin import browser_guard, page, traffic
from millrace_router.admin.traffic import Recent
from millrace_router.fleet.warmups import Shared
from millrace_rpc.errors import MillraceError
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, fails, hangs
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
        clients.append(httpx.AsyncClient(base_url=url, timeout=None, headers=JSON))
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


async def test_both_faces_do_the_same(operate: Callable) -> None:
    made, http = await operate(FakeWorker(PREFILL), FakeWorker(DECODE))
    assert await ask(http, "/warmup") == {"pairs": 1} and made.prefills[0].freezes >= 2
    frozen = await ask(http, "/freeze_gc")
    assert frozen["processes"] == 5 and int(frozen["frozen_objects"]) > 2000
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
    made, http = await operate(Stuck(UNIFIED), timeouts={"silence": 0.5})
    made.workers[0].stuck = True
    status, code, _ = error(await http.post(path))
    assert (status, code) == (503, "worker_lost")


BAD = [  # path, body, status, words
    ("/drain/nowhere:1", b"", 404, "there is no worker at 'nowhere:1'"),
    ("/start_profile", b'{"worker": "a:1"}', 400, "StartProfilesRequest"),
    ("/drain/{worker}", b'{"timeout_s": -1}', 400, "timeout_s must be at least 0"),
    ("/start_profile", b"[]", 400, "StartProfilesRequest"),
    ("/start_profile", b'{"workers": ["\xff"]}', 400, "StartProfilesRequest"),
    ("/start_profile", b'{"workers": ' + b"[" * 5000, 400, "StartProfilesRequest"),
    ("/warmup", b"not JSON", 400, "WarmUpRequest in JSON"),
    ("/warmup", b" " * (65 << 10), 413, "the limit is 65536"),
]


async def test_bad_requests_are_refused_with_their_mistake(operate: Callable) -> None:
    made, http = await operate(FakeWorker(UNIFIED))
    for path, body, status, words in BAD:
        found, _, message = error(await http.post(path.format(worker=made.workers[0].address), content=body))
        assert found == status and words in message, path


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
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_of_another_site_is_refused(method: str, headers: dict[str, str], named: str) -> None:
    with pytest.raises(MillraceError, match=f"the header {named} ") as caught:
        browser_guard.check(method, Headers({"host": "127.0.0.1"} | JSON | headers), ())
    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("host", [*OURS, "operators.example.com:1"])
def test_names_of_this_host_and_of_pods_are_served(host: str) -> None:
    browser_guard.check("GET", Headers({"host": host}), ["operators.example.com"])
    own = {"host": host, "origin": f"http://{host}", "content-type": "Application/JSON; charset=utf-8"}
    browser_guard.check("POST", Headers(own), ["operators.example.com"])


async def test_every_operators_path_keeps_pages_of_other_sites_away(operate: Callable) -> None:
    made, http = await operate(FakeWorker(UNIFIED))
    before, evil = made.workers[0].freezes, {"host": "evil.example.com"}
    asked = [await http.post(path, headers=evil) for path in POSTS]
    asked += [await http.get(path, headers=evil) for path in ("/workers", "/explain/r-1", *FILE_PATHS)]
    asked += [await http.get(path, headers={"origin": "https://evil.example.com"}) for path in FILE_PATHS]
    assert all(error(answer)[:2] == (400, "invalid_argument") for answer in asked)
    assert made.workers[0].freezes == before and not made.workers[0].drained
    assert (await http.get("/health", headers=evil)).status_code == 200
    assert (await http.get("/workers")).status_code == 200


async def test_what_a_form_can_send_is_refused(operate: Callable) -> None:
    _, http = await operate(FakeWorker(UNIFIED))
    del http.headers["content-type"]
    for kind in (
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
    ):
        for path in POSTS:
            status, _, message = error(await http.post(path, headers={"content-type": kind} if kind else {}))
            assert status == 400 and message.startswith("the header content-type must be application/json")


async def test_the_public_port_has_none_of_it(operate: Callable) -> None:
    made, _ = await operate(FakeWorker(UNIFIED))
    for path in PATHS:
        for method in ("GET", "POST"):
            assert (await made.http.request(method, path)).status_code == 404, path


async def test_calls_that_overlap_share_the_next_run() -> None:
    shared, gate = Shared(), asyncio.Event()
    run = AsyncMock(side_effect=gate.wait)
    calls = [asyncio.create_task(shared.run(run)) for _ in range(2)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(shared.run(run)) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls, *late)
    assert run.call_count == 2, "the first began before the others asked"


async def test_a_failed_run_is_one_callers_failure() -> None:
    shared, run = Shared(), AsyncMock(side_effect=[OSError("scripted"), None])
    results = await asyncio.gather(*(shared.run(run) for _ in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [OSError, type(None)] and run.call_count == 2


# ------------------------------------------------------------------------------------- the page


FILES = {path.name: path.read_text() for path in page.FOLDER.iterdir()}
FILE_PATHS = ["/", *(f"/{name}" for name in FILES if name != "index.html")]


# ------------------------------------------------------------------------------------- files


def test_what_the_files_name_is_there_and_nothing_is_elsewhere() -> None:
    named = {name for text in FILES.values() for name in re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"', text)}
    assert {one or other for one, other in named} == FILES.keys() - {"index.html"}
    for name, text in FILES.items():
        urls = set(re.findall(r"\w+://[^\s\"'`$]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not urls, f"{name}: {urls}"


def test_texts_never_become_markup_and_nothing_is_stored() -> None:
    code = "".join(text for name, text in FILES.items() if name.endswith(".js"))
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "localStorage", "sessionStorage", "cookie"):
        assert word not in code, word
    assert not re.search(r"\son\w+=|style=|<script>|<style>", FILES["index.html"]), "the policy forbids it"


async def test_every_file_has_the_policy_and_its_type(operate: Callable) -> None:
    made, http = await operate(FakeWorker(UNIFIED))
    for path in FILE_PATHS:
        answer = await http.get(path)
        assert answer.status_code == 200 and answer.text == FILES[path[1:] or "index.html"]
        kind = page.TYPES[f".{(path[1:] or 'index.html').partition('.')[2]}"]
        assert answer.headers["content-type"].partition(";")[0] == kind
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("connect-src") == f"'self' http://127.0.0.1:{made.router.ports['http']}"
        assert set(policy.pop("require-trusted-types-for").split()) == {"'script'"}
        assert set(policy.values()) == {"'none'", "'self'"}
        head = await http.head(path)
        assert not head.content and head.headers["content-length"] == str(len(answer.content))
        assert (await http.post(path)).status_code == 405


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("localhost:8001", " http://localhost:{port}"),
        ("router.ns.svc:8001", " http://router.ns.svc:{port}"),
        ("[::1]:8001", ""),
        ("a *.localhost", " http://127.0.0.1:{port}"),  # the address that was asked
        ("x;script-src *.localhost", " http://127.0.0.1:{port}"),
    ],
)
async def test_the_policy_names_the_public_port_of_the_same_host(operate: Callable, host: str, source: str) -> None:
    made, http = await operate(FakeWorker(UNIFIED))
    answer = await http.get("/", headers={"host": host})
    wanted = f"connect-src 'self'{source.format(port=made.router.ports['http'])};"
    assert wanted in answer.headers["content-security-policy"]


# ------------------------------------------------------------------------------------- traffic


async def test_operators_are_told_of_it(operate: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind a sample that could not be taken."""
    monkeypatch.setattr(traffic, "PERIOD_S", 0.01)
    monkeypatch.setattr(traffic, "sample", Mock(wraps=traffic.sample, side_effect=chain([KeyError], repeat(DEFAULT))))
    made, http = await operate(FakeWorker(UNIFIED))
    await made.generate([1, 2, 3])
    while True:
        router = (await http.get("/workers")).json()["router"]
        if router["recent"] and router["last_minutes"]["requests"]:
            break
    assert (router["http_port"], router["http_tls"]) == (made.router.ports["http"], False)
    assert router["last_minutes"]["requests"] == {"ok": 1} and router["last_minutes"]["output_tokens"] == 8


async def test_requests_tokens_and_times_of_each_span(pair: Cluster) -> None:
    recent = Recent(pair.router.inference)
    recent.take(0.0)
    await pair.generate([1, 2, 3])
    await pair.quiet()
    recent.take(5.0)
    await pair.generate([1, 2, 3], sampling={"max_tokens": 600})
    recent.take(15.0)
    first, second = recent.spans()
    assert (first.seconds, first.requests, first.prompt_tokens, first.output_tokens) == (5, {"ok": 1}, 3, 8)
    assert 0 < first.ttft.p50 <= first.ttft.p99 and 0 < first.itl.p50 <= first.itl.p99
    assert (second.seconds, second.requests, second.output_tokens) == (10, {"context_too_long": 1}, 0)
    assert not second.HasField("ttft") and not second.HasField("itl")
    whole = recent.whole()
    assert whole is not None and whole.ttft == first.ttft and whole.itl == first.itl
    assert (whole.seconds, whole.requests, whole.output_tokens) == (15, {"ok": 1, "context_too_long": 1}, 8)


async def test_tokens_of_a_stream_that_runs_count_as_they_come(cluster: Callable) -> None:
    worker = FakeWorker(UNIFIED)
    worker.script.append(hangs(after=5))
    made: Cluster = await cluster(worker)
    inference = made.router.inference
    recent = Recent(inference)
    recent.take(0.0)
    call = asyncio.create_task(made.generate([1, 2]))
    await made.until(lambda: traffic.sample(inference, 0.0).totals["tokens"]["output"] == 5)
    recent.take(5.0)
    call.cancel()
    await made.quiet()
    recent.take(10.0)
    running, ended = recent.spans()
    assert (running.active, running.output_tokens, dict(running.requests)) == (1, 5, {})
    assert (ended.active, ended.output_tokens, dict(ended.requests)) == (0, 0, {"cancelled": 1})


@pytest.mark.parametrize(("allowed", "retries", "refused"), [(5.0, {"STALLED": 1}, 0), (0.0, {}, 1)])
async def test_retries_and_those_that_the_budget_refuses(
    cluster: Callable, allowed: float, retries: dict[str, int], refused: int
) -> None:
    worker = FakeWorker(UNIFIED)
    made: Cluster = await cluster(worker, resilience={"retries": {"ratio": 0, "per_s": allowed}})
    worker.script.append(fails("STALLED"))
    recent = Recent(made.router.inference)
    recent.take(0.0)
    await made.generate([1])
    recent.take(5.0)
    (span,) = recent.spans()
    assert (span.retries, span.retries_refused) == (retries, refused)


async def test_the_oldest_span_goes(pair: Cluster) -> None:
    recent = Recent(pair.router.inference)
    for i in range(traffic.SPANS + 10):
        recent.take(5.0 * i)
    whole = recent.whole()
    assert whole is not None and whole.seconds == 5.0 * traffic.SPANS and len(recent.spans()) == traffic.SPANS


@given(
    st.lists(st.floats(0.001, 10), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 50), min_size=7, max_size=7),
    st.floats(0.01, 0.99),
)
def test_a_quantile_is_within_the_bucket_of_its_observation(
    bounds: list[float], counts: list[int], part: float
) -> None:
    bounds = [*sorted(bounds), math.inf]
    counts = counts[: len(bounds)]
    if not any(counts):
        counts[0] = 1
    cumulative = {bound: float(sum(counts[: i + 1])) for i, bound in enumerate(bounds)}
    found = traffic.quantile(part, cumulative)
    rank = part * sum(counts)
    bucket = next(i for i, bound in enumerate(bounds) if cumulative[bound] >= rank)
    lower = bounds[bucket - 1] if bucket else 0.0
    upper = lower if math.isinf(bounds[bucket]) else bounds[bucket]
    assert lower <= found <= math.nextafter(upper, math.inf), "but for rounding"


@pytest.mark.parametrize(
    ("part", "counts", "value"),
    [
        (0.5, {1.0: 10, 2.0: 10, math.inf: 10}, 0.5),
        (0.5, {1.0: 0, 2.0: 10, math.inf: 10}, 1.5),
        (0.99, {1.0: 0, 2.0: 0, math.inf: 10}, 2.0),
    ],
)
def test_quantiles_as_prometheus_has_them(part: float, counts: dict[float, float], value: float) -> None:
    assert traffic.quantile(part, counts) == pytest.approx(value)
