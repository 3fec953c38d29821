"""The process: start, announce, drain on SIGTERM, configuration errors."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.errors import Reason, from_rpc_error
from router.fake_worker import UNIFIED, FakeWorker, expected, hangs
from router.harness import Cluster

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


async def launch(*arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "millrace_router", *arguments]
    return await asyncio.create_subprocess_exec(*command, env=ENV, stderr=asyncio.subprocess.PIPE)


@pytest.fixture
async def unified() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(UNIFIED, step_s=0.02)
    await worker.start()
    yield worker
    await worker.stop()


async def read_json(path: Path) -> dict[str, int]:
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.02)
    return json.loads(path.read_text())


async def until_ready(url: str) -> None:
    async with asyncio.timeout(10), httpx.AsyncClient() as client:
        while (await client.get(url)).status_code != 200:
            await asyncio.sleep(0.02)


async def test_sigterm_lets_streams_finish(model_folder: Path, unified: FakeWorker, tmp_path: Path) -> None:
    announce, config = tmp_path / "ports.json", tmp_path / "router.yaml"
    config.write_text(f"model: {model_folder}\nlog_level: WARNING\n")
    workers = f'workers=["{unified.address}"]'
    process = await launch("--config", str(config), "--set", workers, "--announce", str(announce))
    try:
        ports = await read_json(announce)
        assert ports["pid"] == process.pid and len({ports["grpc"], ports["http"], ports["admin"]}) == 3
        async with channel(f"127.0.0.1:{ports['grpc']}") as ch:
            stub = inference_pb2_grpc.InferenceStub(ch)
            request = inference_pb2.GenerateRequest(
                prompt={"token_ids": {"ids": [1]}}, sampling={"max_tokens": 20, "seed": 0}
            )
            await until_ready(f"http://127.0.0.1:{ports['http']}/ready")
            call = aiter(stub.Generate(request))
            tokens = list((await anext(call)).token_ids)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request).read()
            assert from_rpc_error(caught.value).reason is Reason.DRAINING
            async for response in call:
                tokens += response.token_ids
            assert tokens == expected([1], 20)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_drain_ends_what_outlives_the_grace(cluster: object) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED), timeouts={"drain": 0.1})
    made.workers[0].script.append(hangs(after=2))
    task = asyncio.create_task(made.generate([1]))
    await made.until(lambda: made.workers[0].active)
    await made.router.stop()
    result = await task
    assert from_rpc_error(result.error).reason is Reason.DRAINING
    assert result.tokens() == expected([1], 2)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["model=/nowhere", "colour=red"], "colour: unknown key"),
        (["model=/nowhere"], "no usable tokenizer in /nowhere"),
        ([], "model: required"),
        (["model=/nowhere", "grpc=here"], "grpc: "),
        (["model=/nowhere", "limits.n=0"], "limits.n: "),
    ],
)
async def test_bad_configuration(items: list[str], words: str) -> None:
    process = await launch(*(argument for item in items for argument in ("--set", item)))
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert words in stderr.decode() and "Traceback" not in stderr.decode()


async def test_port_in_use(model_folder: Path, unified: FakeWorker) -> None:
    process = await launch("--set", f"model={model_folder}", "--set", f"grpc={unified.address}")
    _, stderr = await process.communicate()
    assert process.returncode == 2 and "cannot listen on" in stderr.decode()
