"""Bodies that are slow, many, large, encoded or no text: the router keeps its memory and its connections."""

import asyncio
import gzip
import http.client
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import inference_pb2 as pb
from millrace_common.reasons import Reason
from millrace_router.apis import serving
from millrace_router.apis.grpc import service
from millrace_router.config import BodyLimits as Pace
from millrace_router.flow.bodies import Bodies
from millrace_router.http import json_shape
from millrace_router.http.answers import BYTES_PER_S, body_deadline, decoded, read_body
from millrace_router.http.json_shape import JsonShape, shape
from millrace_rpc.errors import MillraceError
from millrace_testing import HANG_S
from millrace_testing.examples import examples
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker
from router.harness import FIRST_KEY, SECOND_KEY, Cluster, bearer, write_keys
from router.http.test_http import POSTS
from starlette.requests import Request

KEY, OTHER = bearer(), bearer(SECOND_KEY)
PATH = "/v1/completions"


async def connect(made: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", made.router.ports["http"])


def head(length: int, *headers: str, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def last_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Of a connection that the router closes."""
    said = await asyncio.wait_for(reader.read(), HANG_S)
    start, _, body = said.partition(b"\r\n\r\n")
    assert b"connection: close" in start, said
    return int(start.split()[1]), json.loads(body)["error"]


@pytest.fixture
async def keyed(cluster: Callable, tmp_path: Path) -> Cluster:
    keys = write_keys(tmp_path, None, {"requests_per_s": 0.001, "requests_burst": 1})
    bodies = {"held": 2000, "held_by_tenant": 1500}
    settings = {"api_keys": keys, "limits": {"message_bytes": 1000}, "bodies": bodies}
    return await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), **settings)


# ------------------------------------------------------------------------------------- not wanted


async def test_a_body_that_is_not_wanted_is_not_read(keyed: Cluster) -> None:
    """Its answer comes at once, is the last one of the connection, and no 100 (Continue) asks for the body."""
    for headers, status in (
        (["expect: 100-continue"], 401),
        (["expect: 100-continue", f"authorization: Bearer {FIRST_KEY}"], 413),
    ):
        reader, writer = await connect(keyed)
        writer.write(head(10**9, *headers))
        assert (await last_answer(reader))[0] == status
        writer.close()
    assert keyed.router.inference.bodies._held == 0


async def test_a_body_without_a_length_is_read_up_to_the_limit(keyed: Cluster) -> None:
    reader, writer = await connect(keyed)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-first-secret-1-0123456789abcdef\r\n"
    )
    writer.write(b"transfer-encoding: chunked\r\n\r\n" + b"190\r\n" + bytes(400) + b"\r\n")
    await keyed.until(lambda: keyed.router.inference.bodies._held == 400)
    writer.write(b"400\r\n" + bytes(1024) + b"\r\n")
    assert (await last_answer(reader))[0] == 413
    writer.close()


async def test_a_large_body_is_not_received_from_a_tenant_over_its_rate(keyed: Cluster) -> None:
    spent = await keyed.http.post(PATH, json=POSTS[PATH], headers=OTHER)
    assert spent.status_code == 200
    keyed.router.config.limits.__dict__["message_bytes"] = 8 << 20
    reader, writer = await connect(keyed)
    writer.write(head(5_000_000, f"authorization: Bearer {SECOND_KEY}"))
    status, error = await last_answer(reader)
    assert status == 429 and error["code"] == "rate_limited"
    assert keyed.metric("millrace_requests_total", api="http", status="rate_limited") == 1
    writer.close()


async def test_a_mistake_costs_the_tokens_that_a_prompt_of_its_length_has(cluster: Callable, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {"tokens_per_s": 1, "tokens_burst": 1000})
    made: Cluster = await cluster(FakeWorker(UNIFIED), api_keys=keys)
    assert (await made.http.post(PATH, content=b" " * 6000, headers=KEY)).status_code == 400
    answer = await made.http.post(PATH, json=POSTS[PATH], headers=KEY)
    assert answer.status_code == 429 and 490 <= int(answer.headers["retry-after"]) <= 501


async def test_clients_read_why_their_large_body_was_refused(pair: Cluster) -> None:
    """They are still sending when the answer comes."""
    text = "a" * (12 << 20)
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="tiny", prompt=text)
        assert caught.value.status_code == 413
    async with anthropic.AsyncAnthropic(base_url=pair.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.RequestTooLargeError):
            await client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": text}])
    async with aiohttp.ClientSession() as session, session.post(f"{pair.url}{PATH}", data=text.encode()) as answer:
        assert answer.status == 413 and (await answer.json())["error"]["code"] == "message_too_large"

    def ask() -> int:
        client = http.client.HTTPConnection("127.0.0.1", pair.router.ports["http"])
        client.putrequest("POST", PATH)
        client.putheader("content-length", str(len(text)))
        client.endheaders()
        client.send(text.encode())
        return client.getresponse().status

    assert await asyncio.to_thread(ask) == 413


# ------------------------------------------------------------------------------------- slow


def test_the_time_for_a_body_grows_with_what_has_come() -> None:
    pace = Pace(timeout=60.0)
    assert body_deadline(5.0, 0, pace) == 15.0
    assert body_deadline(5.0, 20 * BYTES_PER_S, pace) == 35.0
    assert body_deadline(5.0, 10**9, pace) == 65.0


@pytest.mark.parametrize("sent", [b"", b'{"prompt'])
async def test_a_body_that_does_not_come_is_given_up(cluster: Callable, sent: bytes) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED), bodies={"timeout": 0.1})
    reader, writer = await connect(made)
    writer.write(head(1000) + sent)
    status, error = await last_answer(reader)
    assert status == 408 and "the body was not complete after 0.1 s" in error["message"]
    assert made.router.inference.bodies._held == 0
    writer.close()


# ------------------------------------------------------------------------------------- many


def test_bytes_are_bounded_in_all_and_by_tenant() -> None:
    bodies = Bodies(100, 60)
    with bodies.hold("a") as first, bodies.hold("b") as second:
        first(60)
        with pytest.raises(MillraceError, match="of a that are being received have 60 bytes"), bodies.hold("a") as more:
            more(1)
        second(40)
        with pytest.raises(MillraceError, match="of all clients that") as caught:
            second(1)
        assert caught.value.reason is Reason.OVERLOADED and caught.value.retry_after_s > 0
    assert bodies._held == 0 and not bodies._of


async def test_bodies_that_are_held_back_take_no_more_than_their_share(keyed: Cluster) -> None:
    bodies = keyed.router.inference.bodies
    held, asked = await connect(keyed), json.dumps(POSTS[PATH]).encode()
    held[1].write(head(1000, f"authorization: Bearer {FIRST_KEY}") + asked + b" " * (900 - len(asked)))
    await keyed.until(lambda: bodies._held == 900)
    refused = await connect(keyed)
    refused[1].write(head(1000, f"authorization: Bearer {FIRST_KEY}") + b" " * 900)
    status, error = await last_answer(refused[0])
    assert status == 429 and "of one that are being received" in error["message"]
    assert (await keyed.http.post(PATH, json=POSTS[PATH], headers=KEY)).status_code == 200, "a short one has room"
    held[1].write(b" " * 100)
    assert (await asyncio.wait_for(held[0].readline(), HANG_S)).startswith(b"HTTP/1.1 200")
    assert bodies._held == 0
    for _, writer in (held, refused):
        writer.close()


# ------------------------------------------------------------------------------------- large

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(['"', "\\", '\\"', "\\\\", ",", "[{"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(['"', "\\", ",[{"]), inner),
    max_leaves=30,
)


def counted(value: object) -> JsonShape:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    shapes = [counted(part) for part in inner]
    commas = max(len(value) - 1, 0) if isinstance(value, dict | list) else 0
    texts = sum(part.texts for part in shapes) + isinstance(value, str | dict | list)
    return JsonShape(texts, sum(part.separators for part in shapes) + commas)


@examples(40)
@given(JSON, st.booleans())
def test_a_texts_values_are_counted_without_making_them(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert shape(text) == counted(value)


HI = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/chat/completions", {"messages": HI * 600}, "context_length_exceeded"),
        ("/v1/responses", {"input": HI * 600}, "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": HI * 40_000}, "message_too_large"),
        ("/v1/completions", {"prompt": [1] * 200_000}, "message_too_large"),
        (PATH, {"prompt": "a", "metadata": dict.fromkeys(map(str, range(140_000)), 1)}, "message_too_large"),
    ],
)
async def test_what_no_context_can_hold_is_refused_before_it_is_rendered(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], code: str
) -> None:
    monkeypatch.setattr(pair.router.inference.tokenizer, "render", None)
    answer = await pair.http.post(path, json=body)
    assert answer.json()["error"]["code"] == code, answer.text


TURNS = {"chat": {"messages": HI * 200}}
LARGE = {
    "/v1/chat/completions": {"messages": HI * 200, "max_tokens": 1},
    "/v1/completions": {"prompt": [1] * 510, "max_tokens": 1},
    "/v1/responses": {"input": HI * 200, "max_output_tokens": 1},
    "/v1/messages": {"messages": HI * 200, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI * 200},
    "/tokenize": {"messages": HI * 200},
    "/detokenize": {"tokens": [64] * 510},
    "Generate": pb.GenerateRequest(prompt=TURNS, sampling={"max_tokens": 1}),
    "Tokenize": pb.TokenizeRequest(prompt=TURNS),
    "Detokenize": pb.DetokenizeRequest(token_ids=[64] * 510),
}


async def answered_by(made: Cluster, path: str) -> None:
    """Over HTTP, or by the method of gRPC."""
    if path.startswith("/"):
        answer = await made.http.post(path, json=LARGE[path])
        assert answer.status_code == 200, answer.text
    elif path == "Generate":
        assert [response.index async for response in made.stub.Generate(LARGE[path])] == [0]
    else:
        await getattr(made.stub, path)(LARGE[path])


@pytest.mark.parametrize("path", LARGE)
async def test_the_event_loop_turns_while_a_large_body_is_read(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What reads, renders and decodes it waits here until another request was answered, so nothing may do so on the
    loop.
    """
    monkeypatch.setattr(json_shape, "FEW", 100)
    monkeypatch.setattr(serving, "TINY", 100)
    monkeypatch.setattr(service, "SMALL", 100)
    answered, waited = threading.Event(), []

    def slow(work: Callable) -> Callable:
        def wait(*arguments: object) -> object:
            waited.append(work.__name__)
            assert answered.wait(HANG_S), "the event loop stands still"
            return work(*arguments)

        return wait

    makes = "decode" if "etokenize" in path else "render"
    for owner, name in ((serving, "parse"), (service, "_prompt"), (pair.router.inference.tokenizer, makes)):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    asked = asyncio.create_task(answered_by(pair, path))
    await pair.until(lambda: bool(waited))
    assert (await pair.http.get("/health")).status_code == 200
    answered.set()
    await asked
    reads = "parse" if path.startswith("/") else "_prompt"
    assert waited == {PATH: [reads], "Detokenize": [makes]}.get(path, [reads, makes])


# ------------------------------------------------------------------------------------- encodings and texts


BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
MOST = 10_000
PATHS = tuple(POSTS)


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


ENCODED = {
    "gzip": gzip.compress, "x-gzip": gzip.compress, "GZIP": gzip.compress, "identity, gzip": gzip.compress,
    "deflate": zlib.compress, "Deflate": raw_deflate, "identity": bytes, "": bytes,
}  # fmt: skip


@given(st.binary(max_size=MOST), st.sampled_from(sorted(ENCODED)))
def test_what_was_encoded_is_decoded(data: bytes, coding: str) -> None:
    assert decoded(ENCODED[coding](data), coding, MOST) == data


@given(st.binary(min_size=1, max_size=200), st.sampled_from(["gzip", "deflate"]), st.data())
def test_a_broken_body_is_refused(data: bytes, coding: str, drawn: st.DataObject) -> None:
    whole = ENCODED[coding](data)
    cut = whole[: drawn.draw(st.integers(0, len(whole) - 1))]
    for body in (cut, whole + b"x", whole + whole):
        with pytest.raises(MillraceError, match=f"the body is not valid {coding}") as caught:
            decoded(body, coding, MOST)
        assert caught.value.reason is Reason.INVALID_ARGUMENT


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate"]))
def test_no_bytes_do_anything_else_than_be_refused(data: bytes, coding: str) -> None:
    try:
        assert len(decoded(data, coding, MOST)) <= MOST
    except MillraceError as error:
        assert error.row.http in (400, 413)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_is_not_unpacked(coding: str) -> None:
    bomb = ENCODED[coding](bytes(16 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(MillraceError, match="more than 10000 bytes") as caught:
            decoded(bomb, coding, MOST)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.reason is Reason.MESSAGE_TOO_LARGE and peak < 1 << 20


async def test_encodings_over_http(pair: Cluster) -> None:
    http = pair.direct
    for coding, encode in ENCODED.items():
        answer = await http.post("/v1/completions", content=encode(BODY), headers={"content-encoding": coding})
        assert answer.status_code == 200, (coding, answer.text)
    bomb = gzip.compress(bytes(16 << 20))
    for path in PATHS:
        for coding in ("br", "zstd", "compress", "gzip, gzip", "nothing"):
            answer = await http.post(path, content=BODY, headers={"content-encoding": coding})
            assert answer.status_code == 415 and coding in answer.json()["error"]["message"], (path, coding)
            assert answer.headers["accept-encoding"] == "gzip, deflate"
        answer = await http.post(path, content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
        assert answer.status_code == 400 and "not valid gzip" in answer.json()["error"]["message"]
        answer = await http.post(path, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 413


async def test_a_decoded_body_counts_with_all_that_it_became() -> None:
    data, counts = BODY * 50, list[int]()
    packed = gzip.compress(data)
    receive = AsyncMock(return_value={"type": "http.request", "body": packed, "more_body": False})
    request = Request({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receive)
    assert await read_body(request, 10**6, take=counts.append) == data
    assert counts == [len(packed), len(data) - len(packed)]


async def test_a_body_is_json_whatever_its_type_says(pair: Cluster) -> None:
    """A byte order mark is no part of it."""
    for kind in ("application/json; charset=utf-8", "text/plain", "multipart/form-data", "x", None):
        headers = {} if kind is None else {"content-type": kind}
        answer = await pair.http.post("/v1/completions", content=b"\xef\xbb\xbf" + BODY, headers=headers)
        assert answer.status_code == 200, (kind, answer.text)


NOT_TEXT = {
    BODY.decode().encode("utf-16"): "not valid UTF-8",
    BODY.decode().encode("utf-16-le"): "not valid JSON",
    BODY.decode().encode("utf-32"): "not valid",
    b'{"prompt": "\xed\xa0\x80"}': "not valid UTF-8",
    b'{"prompt": "\xff"}': "not valid UTF-8",
    b'{"prompt": "a\x00b"}': "not valid JSON",
    b"\x00": "not valid JSON",
    b"": "not valid JSON",
    b"null": "must be a JSON object",
    b"[" * 100_000: "not valid JSON",
    b'{"prompt": ' + b"1" * 5_000 + b"}": "not valid JSON",
}


async def test_a_body_that_is_no_text_is_refused(pair: Cluster) -> None:
    http = pair.direct
    for path in PATHS:
        for body, words in NOT_TEXT.items():
            answer = await http.post(path, content=body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], (path, body, answer.text)


SURROGATE = '"\\ud800"'
PLACES = {  # where a lone surrogate is: (JSON, path)
    "a value": ('{"model": %s}', "model"),
    "a name": ('{%s: 1}', '["\\ud800"]'),
    "a name of a null": ('{%s: null}', '["\\ud800"]'),
    "an ignored field": ('{"metadata": {"a": [%s]}}', "metadata.a[0]"),
    "a name in an ignored field": ('{"metadata": {%s: 1}}', 'metadata["\\ud800"]'),
    "a refused field": ('{"conversation": %s}', "conversation"),
    "deep": ('{"messages": [{"content": [{"text": %s}]}]}', "messages[0].content[0].text"),
    "a name in an array": ('{"messages": [{%s: ""}]}', 'messages[0]["\\ud800"]'),
    "a name in a schema": ('{"tools": [{"input_schema": {%s: {}}}]}', 'tools[0].input_schema["\\ud800"]'),
}  # fmt: skip


async def test_a_lone_surrogate_anywhere_is_refused_with_its_place(pair: Cluster) -> None:
    http = pair.direct
    for path in PATHS:
        for name, (form, place) in PLACES.items():
            for spelled in (SURROGATE, SURROGATE.upper().replace("U", "u"), '"\\udfff"', '"a\\ud800\\ud800"'):
                answer = await http.post(path, content=form % spelled)
                error = answer.json()["error"]
                assert answer.status_code == 400 and "lone surrogate" in error["message"], (path, name, error)
                if spelled == SURROGATE:
                    assert error["message"].startswith(place), (name, error)
                    assert error.get("param", place) == place
        pairs = await http.post(path, content='{"metadata": {"\\ud83d\\ude00": 1}}')
        assert "surrogate" not in pairs.text


ODD = [b"\xff", b"\xed\xa0\x80", b"\xc3\xa9", b"\x01", b"\x00", b"\x7f", b"\\ud800", b"a\tb", b" ", b"x" * 4000]


@pytest.mark.parametrize("name", ["x-request-id", "x-session-id", "traceparent", "content-type", "content-encoding"])
async def test_no_header_is_a_fault_of_ours(name: str, pair: Cluster) -> None:
    """Any bytes; those that HTTP does not allow are refused by its parser."""
    for value in ODD:
        reader, writer = await connect(pair)
        line = f"{name}: ".encode() + value
        writer.write(head(len(BODY), "connection: close", "ours").replace(b"ours", line) + BODY)
        status = int((await reader.read()).split(b" ", 2)[1])
        assert status in (200, 400, 415), (value, status)
        writer.close()
        await writer.wait_closed()
