"""A worker that costs nothing, for gateways that speak OpenAI's API to their workers: the load of `peers/router.py`.

`POST /v1/chat/completions` streams `max_tokens` chunks, the first at once and then one per step of `--step-ms`, to all
streams in the same turn, as an engine with that batch would. Any GET is answered with a list of one model, which is
what gateways look for. With `logprobs` a token's log-probability is the time when it was sent (fake_worker.py).
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, cast

from millrace_rpc.server import run

from millrace_bench.fake_worker import CLOCK_S, announce, options, steps

MODEL, TEXT = "fake", "~"
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": MODEL}


class Connection(asyncio.Protocol):
    """One client: requests one after the other. Its stream is in `running` while it has one."""

    def __init__(self, running: "set[Connection]") -> None:
        self._running = running
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._left = 0
        self._timed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def connection_lost(self, error: Exception | None) -> None:
        self._running.discard(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        if found and len(rest) >= size:
            self._received = rest[size:]
            self._answer(head, rest[:size])

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET "):
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(MODELS)
            self._write(answer + MODELS)
            return
        request = json.loads(body)
        self._left, self._timed = request["max_tokens"], bool(request.get("logprobs"))
        self._write(STREAM_HEAD)
        self._running.add(self)
        self.step()

    def step(self) -> None:
        """Send the next token, and after the last one the end."""
        self._left -= 1
        data = chunk(self._timed, last=not self._left)
        if not self._left:
            self._running.discard(self)
            data += _sized(b"data: [DONE]\n\n") + _sized(b"")
        self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


def chunk(timed: bool, last: bool) -> bytes:
    """A token's event as a chunk of the body."""
    if not timed:
        return LAST if last else NEXT
    now = time.perf_counter() % CLOCK_S
    return _event(last, {"content": [{"token": TEXT, "logprob": now, "bytes": [ord(TEXT)], "top_logprobs": []}]})


def _event(last: bool, logprobs: Any) -> bytes:
    finish = "length" if last else None
    choice = {"index": 0, "delta": {"content": TEXT}, "logprobs": logprobs, "finish_reason": finish}
    return _sized(b"data: " + json.dumps(CHUNK | {"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n")


def _sized(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


NEXT, LAST = _event(False, None), _event(True, None)


async def serve(step_s: float, announced: Path) -> None:
    loop, running = asyncio.get_running_loop(), set[Connection]()
    server = await loop.create_server(lambda: Connection(running), "127.0.0.1", 0, backlog=4096)
    announce(announced, {"http": server.sockets[0].getsockname()[1]})
    async for _ in steps(step_s):
        for connection in list(running):
            connection.step()


def main() -> None:
    arguments = options(__doc__).parse_args()
    run(serve(arguments.step_ms / 1000, arguments.announce))


if __name__ == "__main__":
    main()
