"""The load generator's own gRPC client: nothing that it counts depends on how the bytes were cut."""

import asyncio
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_bench import frames

MESSAGES = st.lists(st.binary(max_size=40), min_size=1, max_size=8)
CUTS = st.lists(st.integers(1, 60), max_size=60)


def pieces(data: bytes, sizes: list[int]) -> list[bytes]:
    cut = []
    for size in sizes:
        cut.append(data[:size])
        data = data[size:]
    return [piece for piece in (*cut, data) if piece]


def prefixed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@given(MESSAGES, CUTS, CUTS)
def test_messages_are_counted_however_they_are_cut(
    messages: list[bytes], data_cuts: list[int], cuts: list[int]
) -> None:
    """Into DATA frames by the server, and into reads by the network; settings, pings and other frames between."""

    async def run() -> None:
        connection, wire = frames.Connection("/a.B/C"), io.BytesIO()
        connection.connection_made(wire)  # type: ignore[arg-type]
        task = asyncio.create_task(connection.call(b"question"))
        await asyncio.sleep(0)
        assert wire.getvalue().startswith(frames.PREFACE) and wire.getvalue().endswith(prefixed(b"question"))
        answer = frame(frames.SETTINGS, 0, 0) + frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x88")
        for payload in pieces(b"".join(map(prefixed, messages)), data_cuts):
            answer += frame(frames.DATA, 0, 1, payload) + frame(frames.PING, 0, 0, b"12345678")
        answer += frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, b"trailers")
        for piece in pieces(answer, cuts):
            assert not task.done()
            connection.data_received(piece)
        call = await task
        assert (call.messages, call.last) == (len(messages), messages[-1])
        assert wire.getvalue().count(frame(frames.PING, frames.ACK, 0, b"12345678")) == answer.count(b"12345678")

    asyncio.run(run())


async def test_requests_wait_for_the_servers_window() -> None:
    connection, wire = frames.Connection("/a.B/C"), io.BytesIO()
    connection.connection_made(wire)  # type: ignore[arg-type]
    question = bytes(frames.LARGEST_REQUEST)
    tasks = [asyncio.create_task(connection.call(question)) for _ in range(4)]
    await asyncio.sleep(0)
    assert wire.getvalue().count(question) == 3, "64 KiB less one byte"
    connection.data_received(frame(frames.WINDOW_UPDATE, 0, 0, (1 << 14).to_bytes(4, "big")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.getvalue().count(question) == 4
    connection.data_received(frame(frames.RST_STREAM, 0, 1, (7).to_bytes(4, "big")))
    connection.connection_lost(None)
    for task in tasks:
        with pytest.raises(ConnectionError, match="reset a stream with 7" if task is tasks[0] else "closed"):
            await task


async def test_a_request_that_does_not_fit_a_frame() -> None:
    with pytest.raises(ValueError, match="at most 16379"):
        await frames.Connection("/a.B/C").call(bytes(1 << 14))
