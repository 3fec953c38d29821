"""`millrace batch`: send a file of requests, and write their answers to another as they come.

What has an answer in the output is not sent again, so the same command continues a run that was cut off. A request that
no server took is left out of the output, and with that for the next run.
"""

import asyncio
import contextlib
import fcntl
import json
import random
import secrets
import ssl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import httpx
from millrace_common.json_values import JsonObject
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from millrace_cli import batch_file, proxies
from millrace_cli.batch_file import Line
from millrace_cli.errors import CommandError, told

BUSY = (429, 502, 503, 504)  # of the server, or of a proxy before it while the server restarts
TRIES = 20
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between tries: doubled each time, and longer if the server says so
CONNECT_S, ANSWER_S = 10.0, 3600.0
ANSWERED, FAILED, LEFT = "answered", "answered by an error", "not answered: run the command again"  # in a summary


def client_of(address: str, api_key: str, concurrency: int, verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, pool=None)
    limits = httpx.Limits(max_connections=concurrency)
    with told(httpx.InvalidURL, of=f"--address {address}"):
        parsed = httpx.URL(address.rstrip("/").removesuffix("/v1"))
        if parsed.scheme not in ("http", "https") or not parsed.host or (parsed.port or 1) >= 1 << 16:
            raise httpx.InvalidURL("must be http:// or https://, a host, and a port up to 65535")
        return httpx.AsyncClient(base_url=parsed, headers=headers, timeout=timeout, limits=limits, verify=verify)


async def run(client: httpx.AsyncClient, file: Path, out: Path, concurrency: int) -> int:
    """The exit code. Raises CommandError before any work."""
    lines = batch_file.requests(file)
    with _appended(out) as (output, done):
        todo = [line for line in lines if line.custom_id not in done]
        async with client:
            await _check(client)
            counts = await _send_all(client, todo, output, concurrency)
    counts["were there"] = len(lines) - len(todo)
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == ANSWERED)
    Console(stderr=True, highlight=False).print(summary, style="dim")
    return 1 if counts[FAILED] or counts[LEFT] else 0


@contextlib.contextmanager
def _appended(out: Path) -> Iterator[tuple[BinaryIO, set[str]]]:
    """The output, ours alone and without a torn line, and what it answers."""
    with told(OSError, of="--out"):
        if out.exists() and not out.is_file():
            raise CommandError(f"--out: {out} is not a file", code=2)
        output = out.open("ab")
    with told(OSError, of=str(out), code=1), output:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another run writes to {out}: give another --out") from None
        done, size = batch_file.answered(out)
        output.truncate(size)
        yield output, done


async def _check(client: httpx.AsyncClient) -> None:
    try:
        answer = await client.get("/v1/models")
    except httpx.RequestError as error:
        raise CommandError(f"no server answers at {client.base_url}: {error}{proxies.hint()}") from error
    if answer.status_code in (401, 403):
        raise CommandError(f"{client.base_url} refuses the API key: {answer.text}")


async def _send_all(client: httpx.AsyncClient, todo: list[Line], output: BinaryIO, concurrency: int) -> Counter[str]:
    counts, pending = Counter({ANSWERED: 0, FAILED: 0, LEFT: 0}), iter(todo)
    columns = TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("batch", total=len(todo))

        async def send_some() -> None:
            for line in pending:
                answer = await _send(client, line)
                if answer is None:
                    counts[LEFT] += 1
                    continue
                output.write(json.dumps(answer).encode() + b"\n")
                output.flush()
                good = answer["error"] is None and answer["response"]["status_code"] < 400
                counts[ANSWERED if good else FAILED] += 1
                progress.advance(bar)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(todo))):
                    group.create_task(send_some())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return counts


async def _send(client: httpx.AsyncClient, line: Line) -> JsonObject | None:
    """The line of an answer; None: no server took the request."""
    for attempt in range(TRIES):
        answer = None
        with contextlib.suppress(httpx.RequestError):
            answer = await client.post(line.url, content=line.body)
        if answer is not None and answer.status_code not in BUSY:
            return _line(line, answer)
        if attempt + 1 < TRIES:
            await asyncio.sleep(_pause(attempt, answer))
    return None


def _pause(attempt: int, answer: httpx.Response | None) -> float:
    """Seconds until the next try."""
    told = answer.headers.get("retry-after", "") if answer is not None else ""  # it may be a date
    least = min(float(told), LONGEST_PAUSE_S) if told.isdecimal() else 0.0
    pause: float = min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
    return max(least, pause * random.uniform(0.5, 1.0))


def _line(line: Line, answer: httpx.Response) -> JsonObject:
    response, error = None, None
    try:
        request_id = answer.headers.get("x-request-id", "")
        response = {"status_code": answer.status_code, "request_id": request_id, "body": answer.json()}
    except ValueError:
        error = {"code": "not_json", "message": f"status {answer.status_code}: {answer.text[:200]}"}
    name = f"batch_req_{secrets.token_hex(12)}"
    return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
