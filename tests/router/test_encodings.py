"""Bodies of requests over HTTP: how they are compressed, and which texts they may have."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.http.encodings import decoded
from millrace_rpc.errors import MillraceError
from router.harness import Cluster

BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
MOST = 10_000
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip


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
    bomb = ENCODED[coding](bytes(100 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(MillraceError, match="more than 10000 bytes") as caught:
            decoded(bomb, coding, MOST)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.reason is Reason.MESSAGE_TOO_LARGE and peak < 1 << 20


async def test_encodings_over_http(pair: Cluster) -> None:
    for coding, encode in ENCODED.items():
        answer = await pair.http.post("/v1/completions", content=encode(BODY), headers={"content-encoding": coding})
        assert answer.status_code == 200, (coding, answer.text)
    for path in PATHS:
        for coding in ("br", "zstd", "compress", "gzip, gzip", "nothing"):
            answer = await pair.http.post(path, content=BODY, headers={"content-encoding": coding})
            assert answer.status_code == 415 and coding in answer.json()["error"]["message"], (path, coding)
            assert answer.headers["accept-encoding"] == "gzip, deflate"
        answer = await pair.http.post(path, content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
        assert answer.status_code == 400 and "not valid gzip" in answer.json()["error"]["message"]
        bomb = gzip.compress(bytes(100 << 20))
        answer = await pair.http.post(path, content=bomb, headers={"content-encoding": "gzip"})
        assert answer.status_code == 413


async def test_a_byte_order_mark_is_no_part_of_the_body(pair: Cluster) -> None:
    assert (await pair.http.post("/v1/completions", content=b"\xef\xbb\xbf" + BODY)).status_code == 200


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "text/plain", "multipart/form-data", "x", None]
)
async def test_a_body_is_json_whatever_its_type_says(kind: str | None, pair: Cluster) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await pair.http.post("/v1/completions", content=BODY, headers=headers)
    assert answer.status_code == 200, answer.text


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


async def test_what_is_no_text(pair: Cluster) -> None:
    for path in PATHS:
        for body, words in NOT_TEXT.items():
            answer = await pair.http.post(path, content=body)
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


async def test_lone_surrogates(pair: Cluster) -> None:
    for path in PATHS:
        for name, (form, place) in PLACES.items():
            for spelled in (SURROGATE, SURROGATE.upper().replace("U", "u"), '"\\udfff"', '"a\\ud800\\ud800"'):
                answer = await pair.http.post(path, content=form % spelled)
                error = answer.json()["error"]
                assert answer.status_code == 400 and "lone surrogate" in error["message"], (path, name, error)
                if spelled == SURROGATE:
                    assert error["message"].startswith(place), (name, error)
                    assert error.get("param", place) == place
        pairs = await pair.http.post(path, content='{"metadata": {"\\ud83d\\ude00": 1}}')
        assert "surrogate" not in pairs.text


@pytest.mark.parametrize("name", ["x-request-id", "x-session-id", "traceparent", "content-type", "content-encoding"])
async def test_no_header_is_a_fault_of_ours(name: str, pair: Cluster) -> None:
    """Any bytes; those that HTTP does not allow are refused by its parser."""
    for value in (
        b"\xff",
        b"\xed\xa0\x80",
        b"\xc3\xa9",
        b"\x01",
        b"\x00",
        b"\x7f",
        b"\\ud800",
        b"a\tb",
        b" ",
        b"x" * 4000,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.router.ports["http"])
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n" % len(BODY)
        writer.write(head + name.encode() + b": " + value + b"\r\n\r\n" + BODY)
        status = int((await reader.read()).split(b" ", 2)[1])
        assert status in (200, 400, 415), (value, status)
        writer.close()
        await writer.wait_closed()
