"""Requests that nobody would write, over HTTP and gRPC, against a router and its workers."""

import asyncio
import collections
import os
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from millrace.v1 import admin_pb2, decode_pb2, inference_pb2, kv_pb2, prefill_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from millrace_testing.shared import shared
from millrace_testing.unharmed import Unharmed
from millrace_testing.wire import messages
from schemathesis import GenerationMode

SECONDS = float(os.environ.get("MILLRACE_FUZZ_S", 20))  # of all tests here together; 600 before a release
SHARE = {"http": 0.4, "bodies": 0.1, "public": 0.3, "workers": 0.2}
CHECK_S = 10.0  # between two looks at the system
PATIENCE_S = 60.0  # of one answer
pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(SECONDS + 900),
]
WORKERS = (
    "dtype=float32",
    "limits={num_pages: 200, max_model_len: 256, max_running: 16, draft_tokens: 2, page_size: 16}",
    "timeouts={stall: 1, lease: 2}",
)
BUSY = {Reason.NO_WORKERS, Reason.OVERLOADED, Reason.QUEUE_FULL, Reason.RATE_LIMITED, Reason.SLOW_CLIENT}
FAULTS = {Reason.INTERNAL, Reason.WORKER_LOST, Reason.STALLED, Reason.TRANSFER_FAILED}
LEFT_OUT = {"Drain", "SetWeights"}  # of workers: they do what they are asked for, and nobody is served then
QUICK = settings(
    max_examples=20,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
cluster = shared(lambda: LocalCluster(ClusterSpec(worker_set=WORKERS)))


async def for_a_while(cluster: LocalCluster, share: str, rounds: list[Callable[[], None]]) -> None:
    """Run `rounds` one after the other, in a thread, until the time is over; the system is looked at now and then."""
    end, left = time.monotonic() + SECONDS * SHARE[share], collections.deque(rounds)
    while time.monotonic() < end:
        async with Unharmed(cluster):
            until = min(end, time.monotonic() + CHECK_S)
            while time.monotonic() < until:
                await asyncio.to_thread(left[0])
                left.rotate(-1)


# ---------------------------------------------------------------------------------------------------- HTTP


def check_http(answer: Any, what: object) -> None:
    """A schemathesis or httpx response."""
    text = answer.text if hasattr(answer, "text") else ""
    code = answer.status_code
    assert code < 500 or (code == 503 and "no_workers" in text), f"{what!r:.3000}: {code} {text[:1000]}"


async def test_http(cluster: LocalCluster) -> None:
    """Requests that the published description allows, and others."""
    schema = await asyncio.to_thread(schemathesis.openapi.from_url, f"{cluster.http_url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]

    def fuzz(operation: Any, mode: GenerationMode) -> Callable[[], None]:
        @QUICK
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            check_http(case.call(timeout=PATIENCE_S), (operation.path, case.body, case.headers))

        return run

    wrong = [one for one in operations if one.method == "post"]  # what has no body has nothing to be wrong
    rounds = [(GenerationMode.POSITIVE, operations), (GenerationMode.NEGATIVE, wrong)]
    await for_a_while(cluster, "http", [fuzz(one, mode) for mode, some in rounds for one in some])


async def test_bodies_over_http(cluster: LocalCluster) -> None:
    """Bytes that are no JSON, or JSON of another form, on every route that reads a body, operators' too."""
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    )
    document = (await asyncio.to_thread(httpx.get, f"{cluster.http_url}/openapi.json")).json()
    public = [(cluster.http_url, path) for path, item in document["paths"].items() if "post" in item]
    paths = ("drain/x", "warmup", "freeze_gc", "flush_cache", "start_profile", "stop_profile")
    operators = [(cluster.admin_http_url, f"/{path}") for path in paths]
    content = st.one_of(st.binary(max_size=200), json_values.map(lambda v: repr(v).encode()))
    names = st.sampled_from(["messages", "prompt", "input", "tokens", "tools", "timeout_s", "max_tokens", "workers"])

    @QUICK
    @given(
        where=st.sampled_from(public + operators),
        body=content,
        value=st.dictionaries(names, json_values, max_size=4),
        plain=st.booleans(),
    )
    def run(where: tuple[str, str], body: bytes, value: Any, plain: bool) -> None:
        url = "".join(where)
        given = {"content": body, "headers": JSON} if plain else {"json": _finite(value)}
        answer = httpx.post(url, timeout=PATIENCE_S, **given)  # type: ignore[arg-type]
        check_http(answer, (url, given))

    await for_a_while(cluster, "bodies", [run])


JSON = {"content-type": "application/json"}


def _finite(value: Any) -> Any:
    """What httpx can write."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return 1e308 if isinstance(value, float) and not abs(value) < 1e308 else value


# ---------------------------------------------------------------------------------------------------- gRPC

METADATA = st.lists(
    st.tuples(
        st.sampled_from(["x-request-id", "traceparent", "authorization", "x-api-key", "x-any", "user-agent"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300),
    ),
    max_size=3,
)


def call(ch: grpc.Channel, method: Any, requests: list[bytes], metadata: Any = ()) -> None:
    """Any method, until its first answers. Raises AssertionError for a fault of the server's."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    what = (path, requests, metadata)
    endless = method.name.startswith("Watch") or method.client_streaming
    try:
        if method.client_streaming:
            answers = ch.stream_stream(path)(iter(requests), timeout=2, metadata=metadata)
        elif method.server_streaming:
            answers = ch.unary_stream(path)(requests[0], timeout=2 if endless else PATIENCE_S, metadata=metadata)
        else:
            ch.unary_unary(path)(requests[0], timeout=PATIENCE_S, metadata=metadata)
            return
        for _ in answers:
            pass
    except grpc.RpcError as error:
        found = from_rpc_error(error)
        patient = found.reason is not Reason.DEADLINE_EXCEEDED or endless
        good = patient and (found.reason in BUSY or found.reason not in FAULTS)
        assert good or error.code() is grpc.StatusCode.UNIMPLEMENTED, f"{what!r:.3000}: {error.code()} {found}"


def methods(*files: Any) -> list[Any]:
    services = (service for file in files for service in file.DESCRIPTOR.services_by_name.values())
    return [method for service in services for method in service.methods if method.name not in LEFT_OUT]


def fuzz(address: str, method: Any, first: list[bytes]) -> Callable[[], None]:
    """`first` messages of a stream, which may be left out."""
    kind = method.input_type

    @QUICK
    @given(
        bodies=st.lists(st.one_of(messages(kind), st.binary(max_size=64)), min_size=1, max_size=3),
        metadata=METADATA,
        begins=st.booleans(),
    )
    def run(bodies: list[bytes], metadata: Any, begins: bool) -> None:
        call(ch, method, [*(first if begins else ()), *bodies], metadata)

    def connected() -> None:
        nonlocal ch
        with grpc.insecure_channel(address) as ch:
            run()

    ch: Any = None
    return connected


async def test_public_and_operators_grpc(cluster: LocalCluster) -> None:
    rounds = [fuzz(cluster.grpc_address, method, []) for method in methods(inference_pb2)]
    rounds += [fuzz(cluster.admin_address, method, []) for method in methods(admin_pb2)]
    await for_a_while(cluster, "public", rounds)


async def test_grpc_of_workers(cluster: LocalCluster) -> None:
    """As from routers and workers of other versions."""
    rounds = []
    for name, file in (("prefill-0", prefill_pb2), ("decode-0", decode_pb2)):
        address = cluster.address(name)
        async with grpc.aio.insecure_channel(address) as ch:
            ask = ch.unary_unary("/millrace.v1.WorkerService/GetInfo")
            info = worker_pb2.WorkerInfo.FromString(await ask(b""))
        hello = worker_pb2.LinkHello(router_id="fuzz", epoch=info.epoch)
        opening = kv_pb2.FetchOpen(id={"room": 5}, epoch=info.epoch, fingerprint=info.layout.fingerprint)
        for method in methods(file, kv_pb2, worker_pb2):
            first = {
                "PrefillLinkRequest": prefill_pb2.PrefillLinkRequest(hello=hello),
                "DecodeLinkRequest": decode_pb2.DecodeLinkRequest(hello=hello),
                "FetchRequest": kv_pb2.FetchRequest(open=opening),
            }.get(method.input_type.name)
            rounds.append(fuzz(address, method, [] if first is None else [first.SerializeToString()]))
    await for_a_while(cluster, "workers", rounds)
