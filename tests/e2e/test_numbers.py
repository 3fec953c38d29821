"""No number in any field of any API ends a process: every numeric field, found in the types, with some of the values.

MILLRACE_NUMBERS_SHARE=1 tries every value with every field.

The system is a real one, with drafts, and with a context so short that what is accepted is soon done.
"""

import asyncio
import json
import re
from collections.abc import Iterable
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from millrace.v1 import admin_pb2, common_pb2, decode_pb2, inference_pb2, kv_pb2, prefill_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_common.page_hash import BLOCK_BYTES
from millrace_common.reasons import Reason
from millrace_rpc.client import channel
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_testing import HANG_S, numbers
from millrace_testing.client import Client
from millrace_testing.numbers import LITERALS, UNREADABLE, Leaf, json_leaves, proto_leaves, schema_leaves, some
from millrace_testing.shared import shared
from millrace_testing.unharmed import Unharmed

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 16
CONTEXT = 64
SETTINGS = (
    "dtype=float32",
    f"limits={{num_pages: 120, max_model_len: {CONTEXT}, max_running: 16, draft_tokens: 2, page_size: 16}}",
    "timeouts={stall: 1, lease: 1}",
)
PROMPT = inference_pb2.Prompt(text="x")
HELLO = [{"role": "user", "content": "x"}]
FEW = {"prompt": "x", "messages": HELLO, "input": "x", "max_tokens": 2, "max_output_tokens": 2, "logprobs": 1}
FAULTS = {Reason.INTERNAL, Reason.WORKER_LOST, Reason.STALLED, Reason.TRANSFER_FAILED}
cluster = shared(lambda: LocalCluster(ClusterSpec(worker_set=SETTINGS)))


async def at_once(calls: Iterable[Any]) -> None:
    """Run coroutines, a few at the same time. Raises all their failures as one."""
    few, failures = asyncio.Semaphore(AT_ONCE), list[str]()

    async def run(call: Any) -> None:
        async with few:
            try:
                await call
            except AssertionError as error:
                failures.append(str(error).partition("\n")[0])

    await asyncio.gather(*map(run, calls))
    assert not failures, f"{len(failures)}:\n" + "\n".join(failures[:40])


# ---------------------------------------------------------------------------------------------------- HTTP


async def http_leaves(http: httpx.AsyncClient) -> list[tuple[str, Leaf]]:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    bodies = {
        path: item["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, item in document["paths"].items()
        if "post" in item
    }
    return [(path, leaf) for path, schema in bodies.items() for leaf in json_leaves(schema, schemas)]


def base(path: str) -> dict[str, Any]:
    """What the endpoint needs, and few outputs."""
    names = {
        "/v1/chat/completions": ("messages", "max_tokens"),
        "/v1/completions": ("prompt", "max_tokens", "logprobs"),
        "/v1/responses": ("input", "max_output_tokens"),
        "/v1/messages": ("messages", "max_tokens"),
        "/v1/messages/count_tokens": ("messages",),
        "/tokenize": ("messages",),
    }
    known = {name: FEW[name] for name in names.get(path, ())}
    return known | ({"logprobs": True} if path == "/v1/chat/completions" else {})


async def test_every_number_over_http(cluster: LocalCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=HANG_S) as http, Unharmed(cluster):
        leaves = await http_leaves(http)
        assert len({path for path, _ in leaves}) >= 7 and len(leaves) > 70

        async def ask(path: str, leaf: Leaf, literal: str) -> None:
            body = leaf.text(literal, base(path))
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            where = f"{path} {'.'.join(leaf.names)}={literal[:30]}: {answer.status_code} {answer.text[:300]}"
            assert 200 <= answer.status_code < 300 or 400 <= answer.status_code < 500, where
            if answer.status_code >= 400 and answer.status_code != 408 and literal not in UNREADABLE:
                error = answer.json()["error"]
                named = set(re.findall(r"\w+", f"{error.get('param')} {error['message']}"))
                assert named & set(leaf.names), where

        await at_once(ask(path, leaf, literal) for (path, leaf), literal in some(leaves))


async def test_every_number_in_a_grammar(cluster: LocalCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=HANG_S) as http, Unharmed(cluster):

        async def ask(body: dict[str, Any], literal: str) -> None:
            text = json.dumps({"messages": HELLO, "max_tokens": 2} | body).replace(f'"{numbers.NUMBER}"', literal)
            answer = await http.post("/v1/chat/completions", content=text, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), f"{text[:300]}: {answer.status_code} {answer.text[:300]}"

        def schema(value: Any) -> dict[str, Any]:
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}

        def tool(value: Any) -> dict[str, Any]:
            function = {"name": "f", "parameters": value, "strict": True}
            return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}

        schemas = list(schema_leaves())
        regexes = [{"guided_regex": form % literal} for literal in LITERALS for form in ("a{%s}", "a{1,%s}", "a{%s,}")]
        await at_once(ask(form(leaf), literal) for form in (schema, tool) for leaf, literal in some(schemas))
        await at_once(ask(body, "1") for body in regexes[:: numbers.SHARE])


async def test_numbers_in_headers(cluster: LocalCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=HANG_S) as http, Unharmed(cluster):

        async def ask(name: str, literal: str) -> None:
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={name: literal})
            assert answer.status_code in (200, 400), f"{name}={literal[:30]}: {answer.status_code} {answer.text[:300]}"

        names = ("x-request-id", "x-session-id", "traceparent", "tracestate", "idempotency-key", "x-stainless-timeout")
        await at_once(ask(name, literal) for name, literal in some(names))


# ---------------------------------------------------------------------------------------------------- gRPC


async def call(ch: grpc.aio.Channel, method: Any, requests: list[Message], **options: Any) -> Message | None:
    """The first answer of a method of any kind. Raises MillraceError."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = GetMessageClass(method.output_type)
    ways = {(False, False): ch.unary_unary, (False, True): ch.unary_stream, (True, True): ch.stream_stream}
    make = ways[method.client_streaming, method.server_streaming](
        path, request_serializer=type(requests[0]).SerializeToString, response_deserializer=kind.FromString
    )
    try:
        if not method.server_streaming:
            return await make(requests[0], timeout=HANG_S, **options)
        stream = make(**options) if method.client_streaming else make(requests[0], **options)
        try:
            for request in requests if method.client_streaming else ():
                await stream.write(request)
            answer = await asyncio.wait_for(stream.read(), HANG_S)
            return None if answer is grpc.aio.EOF else answer
        finally:
            stream.cancel()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def refused_or_answered(where: str, answer: Any, names: tuple[str, ...] = ()) -> None:
    try:
        await answer
    except MillraceError as error:
        assert error.reason not in FAULTS, f"{where}: {error}"
        assert error.reason is not Reason.INVALID_ARGUMENT or any(name in error.message for name in names), (
            f"{where}: {error}"
        )


def services(*files: Any) -> list[Any]:
    """All methods of all services of these files."""
    return [m for file in files for service in file.DESCRIPTOR.services_by_name.values() for m in service.methods]


async def test_every_number_over_grpc(cluster: LocalCluster) -> None:
    fixed = {
        "GenerateRequest": inference_pb2.GenerateRequest(prompt=PROMPT, sampling={"max_tokens": 2, "logprobs": 1}),
        "TokenizeRequest": inference_pb2.TokenizeRequest(prompt=PROMPT),
    }
    async with channel(cluster.grpc_address) as public, channel(cluster.admin_address) as admin, Unharmed(cluster):
        calls = []
        for method in services(inference_pb2, admin_pb2):
            ch = admin if method.containing_service.name == "Admin" else public
            for leaf in proto_leaves(method.input_type):
                request = GetMessageClass(method.input_type)()
                if method.input_type.name in fixed:
                    request.CopyFrom(fixed[method.input_type.name])
                request.MergeFrom(leaf.message)
                if method.name == "DrainWorker" and not leaf.value >= 0:  # what is accepted drains: see below
                    request.address = cluster.address("decode-0")
                where = f"{method.name} {'.'.join(leaf.names)}={leaf.value}"
                known = (*leaf.names, "address", "profile_dir")
                calls.append(refused_or_answered(where, call(ch, method, [request]), known))
        assert len(calls) > 10
        await at_once(calls)


@pytest.mark.parametrize("timeout_s", [1e-9, -1.0, 1e8, 2.0**32, float("inf")])
async def test_any_deadline_over_grpc(cluster: LocalCluster, timeout_s: float) -> None:
    request = inference_pb2.GenerateRequest(prompt=PROMPT, sampling=common_pb2.SamplingParams(max_tokens=2))
    [method] = [method for method in services(inference_pb2) if method.name == "Generate"]
    async with channel(cluster.grpc_address) as ch, Unharmed(cluster):
        far = 1 <= timeout_s < 9e9  # gRPC's own client ends calls with later deadlines at once
        try:
            answer = await call(ch, method, [request], timeout=timeout_s)
            assert answer is not None and far
        except MillraceError as error:
            assert error.reason is Reason.DEADLINE_EXCEEDED and not far


# ---------------------------------------------------------------------------------------------------- workers


async def sources(cluster: LocalCluster) -> dict[str, worker_pb2.KvSourceRef]:
    found = {}
    for name in ("prefill-0", "decode-0"):
        async with channel(cluster.address(name)) as ch:
            [method] = [method for method in services(worker_pb2) if method.name == "GetInfo"]
            info: Any = await call(ch, method, [worker_pb2.GetInfoRequest()])
            found[name] = worker_pb2.KvSourceRef(
                address=cluster.address(name), epoch=info.epoch, fingerprint=info.layout.fingerprint
            )
    return found


async def linked(ch: grpc.aio.Channel, method: Any, epoch: str, leaf: numbers.ProtoLeaf, message: Any) -> None:
    """One message on a Link of its own: what was submitted is answered, and its end is no fault of the worker."""
    path, where = f"/{method.containing_service.full_name}/{method.name}", f"{'.'.join(leaf.names)}={leaf.value}"
    stream = ch.stream_stream(path, type(message).SerializeToString, worker_pb2.LinkResponse.FromString)()
    try:
        await stream.write(type(message)(hello=worker_pb2.LinkHello(router_id=where, epoch=epoch)))
        assert (await asyncio.wait_for(stream.read(), HANG_S)).HasField("welcome")
        await stream.write(message)
        if not message.HasField("submit"):
            return
        while True:
            response = await asyncio.wait_for(stream.read(), HANG_S)
            assert response is not grpc.aio.EOF, f"{where}: the link ended"
            for output in response.outputs.outputs:
                assert output.failure.reason not in FAULTS, f"{where}: {output.failure}"
                if output.finish_reason or method.containing_service.name == "PrefillService":
                    return
    except TimeoutError:
        raise AssertionError(f"{where}: no answer") from None
    except grpc.aio.AioRpcError as error:
        raise AssertionError(f"{where}: {error.details()}") from error
    finally:
        stream.cancel()


async def test_every_number_that_a_router_could_send(cluster: LocalCluster) -> None:
    """Of another version, which checks less: a worker's own checks hold."""
    known, room = await sources(cluster), 1 << 40
    async with (
        channel(cluster.address("prefill-0")) as prefill,
        channel(cluster.address("decode-0")) as decode,
        Unharmed(cluster),
    ):
        calls = []
        for method in services(prefill_pb2, decode_pb2):
            exports = method.containing_service.name == "PrefillService"
            ch, epoch = (prefill, known["prefill-0"].epoch) if exports else (decode, known["decode-0"].epoch)
            for leaf in proto_leaves(method.input_type):
                message: Any = GetMessageClass(method.input_type)()
                if leaf.names[0] == "submit":
                    room += 1
                    request = message.submit.request
                    request.id.room = room
                    request.token_ids.extend([20] * 20)
                    request.sampling.max_tokens = 2
                    if exports and "prefix" in leaf.names:
                        message.submit.prefix.worker.CopyFrom(known["decode-0"])
                        message.submit.prefix.num_pages = 1
                message.MergeFrom(leaf.message)
                calls.append(linked(ch, method, epoch, leaf, message))
        assert len(calls) > 40
        await at_once(calls)


async def test_every_number_of_the_other_services_of_workers(cluster: LocalCluster) -> None:
    known = await sources(cluster)
    async with Unharmed(cluster):
        for name, source in known.items():
            async with channel(cluster.address(name)) as ch:
                calls = []
                for method in services(kv_pb2, worker_pb2):
                    for leaf in proto_leaves(method.input_type):
                        request: Any = GetMessageClass(method.input_type)()
                        if method.name == "Fetch":
                            request.open.id.room, request.open.epoch = 5, source.epoch
                            request.open.fingerprint = source.fingerprint
                            if "prefix" in leaf.names:
                                request.open.prefix.blocks.append(bytes(BLOCK_BYTES))
                        if method.name == "Abort":
                            request.id.room = 5
                        request.MergeFrom(leaf.message)
                        if method.name == "Drain" and leaf.value >= 0:
                            continue  # see below
                        where = f"{name} {method.name} {'.'.join(leaf.names)}={leaf.value}"
                        names = (*leaf.names, "profile_dir")
                        calls.append(refused_or_answered(where, call(ch, method, [request]), names))
                await at_once(calls)


async def test_drain_may_take_as_long_as_one_likes(cluster: LocalCluster) -> None:
    """What runs ends, and so does the process, when it is told to: the last test of this system."""
    async with Client(cluster.grpc_address, cluster.admin_address) as client:
        running = aiter(client.stream([20] * 4, max_tokens=50, ignore_eos=True))
        tokens = len((await anext(running)).token_ids)
        request = admin_pb2.DrainWorkerRequest(address=cluster.address("decode-0"), timeout_s=float("inf"))
        assert client.admin is not None and (await client.admin.DrainWorker(request)).aborted == 0
        async for chunk in running:
            tokens += len(chunk.token_ids)
        assert tokens == 50 and cluster.processes["decode-0"].running
        await cluster.processes["decode-0"].stop(20)
        assert cluster.processes["decode-0"].returncode == 0
