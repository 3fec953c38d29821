"""The page of the operators' port: what the browser is told of it, and the traffic that it shows."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_router.admin import page, traffic
from millrace_router.admin.traffic import Recent
from router.fake_worker import UNIFIED, FakeWorker, fails, hangs
from router.harness import Cluster

FILES = {path.name: path.read_text() for path in page.FOLDER.iterdir()}
PATHS = ["/", *(f"/{name}" for name in FILES if name != "index.html")]


def admin_url(made: Cluster) -> str:
    return f"http://127.0.0.1:{made.router.ports['admin_http']}"


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


async def test_every_file_has_the_policy_and_its_type(pair: Cluster) -> None:
    port = pair.router.ports["http"]
    async with httpx.AsyncClient(base_url=admin_url(pair)) as http:
        for path in PATHS:
            answer = await http.get(path)
            assert answer.status_code == 200 and answer.text == FILES[path[1:] or "index.html"]
            kind = page.TYPES[f".{(path[1:] or 'index.html').partition('.')[2]}"]
            assert answer.headers["content-type"].partition(";")[0] == kind
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy.pop("connect-src") == f"'self' http://127.0.0.1:{port}"
            assert set(policy.pop("require-trusted-types-for").split()) == {"'script'"}
            assert set(policy.values()) == {"'none'", "'self'"}
            head = await http.head(path)
            assert not head.content and head.headers["content-length"] == str(len(answer.content))
            assert (await http.post(path, headers={"content-type": "application/json"})).status_code == 405


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
async def test_the_policy_names_the_public_port_of_the_same_host(pair: Cluster, host: str, source: str) -> None:
    async with httpx.AsyncClient(base_url=admin_url(pair)) as http:
        answer = await http.get("/", headers={"host": host})
    wanted = f"connect-src 'self'{source.format(port=pair.router.ports['http'])};"
    assert wanted in answer.headers["content-security-policy"]


@pytest.mark.parametrize("headers", [{"host": "evil.example.com"}, {"origin": "https://evil.example.com"}])
async def test_another_site_gets_no_file(pair: Cluster, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=admin_url(pair), headers=headers) as http:
        assert {(await http.get(path)).status_code for path in PATHS} == {400}


# ------------------------------------------------------------------------------------- traffic


async def test_operators_are_told_of_it(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PERIOD_S", 0.01)
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    await made.generate([1, 2, 3])
    async with httpx.AsyncClient(base_url=admin_url(made)) as http, asyncio.timeout(120):
        while True:
            router = (await http.get("/workers")).json()["router"]
            if router["recent"] and router["last_minutes"]["requests"]:
                break
    assert (router["http_port"], router["http_tls"]) == (made.router.ports["http"], False)
    assert router["last_minutes"]["requests"] == {"ok": 1} and router["last_minutes"]["output_tokens"] == 8


async def test_before_the_second_sample_there_is_none(pair: Cluster) -> None:
    recent = Recent(pair.router.inference)
    for _ in range(2):
        assert recent.spans() == [] and recent.whole() is None
        recent.take(0.0)


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
    await made.until(lambda: traffic.sample(inference, 0.0).output_tokens == 5)
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
    assert lower <= found <= (lower if math.isinf(bounds[bucket]) else bounds[bucket])


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
