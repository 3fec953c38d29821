"""The bench of our router beside smg: its worker and its clients, without smg, which is not ours to install."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from millrace_bench.peers.clients import HttpStream, Load, Target, first_tokens, latencies
from millrace_bench.peers.router import Settings, run
from millrace_bench.peers.sse_worker import MODEL, STREAM_HEAD, chunk, serve
from millrace_bench.router_system import Settings as SystemSettings
from millrace_bench.router_system import system


@contextlib.asynccontextmanager
async def sse_worker(folder: Path) -> AsyncIterator[Target]:
    announced = folder / "worker.json"
    task = asyncio.create_task(serve(0.01, announced))
    while not announced.exists():
        await asyncio.sleep(0.01)
    port = int(announced.read_text().strip("}").rpartition(":")[2])
    yield Target("http", f"127.0.0.1:{port}", MODEL)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def measures(target: Target, streams: int) -> None:
    async with Load(target, streams) as load:
        tokens, at = load.tokens()
        while (later := load.tokens())[0] < tokens + streams:
            await asyncio.sleep(0.05)
        assert later[1] > at
        ways = await asyncio.to_thread(latencies, target, 0.5)
        firsts = await asyncio.to_thread(first_tokens, target, 3)
    assert ways and all(0 <= seconds < 30 for seconds in ways)
    assert len(firsts) == 3 and all(0 < seconds < 30 for seconds in firsts)


async def test_clients_and_the_worker(tmp_path: Path) -> None:
    async with sse_worker(tmp_path) as target:
        await measures(target, 4)


@pytest.mark.e2e
async def test_clients_and_our_router() -> None:
    async with system(SystemSettings(), 1) as ours:
        for api, address in (("http", ours.http[0]), ("grpc", ours.grpc[0])):
            await measures(Target("grpc" if api == "grpc" else "http", address, MODEL), 4)


def test_without_smg_there_is_a_plain_word(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="requirements/peers"):
        run(Settings(smg=tmp_path / "smg"))


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
async def test_ways_are_read_however_the_answer_is_cut(size: int) -> None:
    stream = HttpStream(b"", timed=True)
    answer = STREAM_HEAD + chunk(timed=True, last=False) * 2 + chunk(timed=True, last=True) + b"0\r\n\r\n"
    for at in range(0, len(answer), size):
        stream.data_received(answer[at : at + size])
    assert stream.tokens == 2 * 3  # the text, and the token's name
    assert len(stream.latencies) == 3 and all(0 <= seconds < 30 for seconds in stream.latencies)
