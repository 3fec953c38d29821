"""The process: start, announce, drain on SIGTERM, configuration errors."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import get_args

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import inference_pb2_grpc
from millrace_common.reasons import Reason
from millrace_common.tls_config import Tls
from millrace_router import main as main_module
from millrace_router.config import RouterConfig
from millrace_router.main import PARTING_S, Router, main
from millrace_rpc.client import channel
from millrace_rpc.errors import from_rpc_error
from millrace_testing import HANG_S
from millrace_testing.certificates import Authority
from millrace_testing.proxy import Proxy
from pydantic import BaseModel
from router.fake_worker import UNIFIED, FakeWorker, expected, hangs, waits
from router.harness import Cluster, becomes, events, request_of

NO_ORIGINS = ("chat.example.com", "https://chat.example.com/", "https://*.example.com", "")
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
    while not path.exists():
        await asyncio.sleep(0.02)
    return json.loads(path.read_text())


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        while (await client.get(url)).status_code != 200:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(
    folder: Path, worker: FakeWorker, tmp_path: Path, drain_s: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, int]]]:
    """A router's process and its ports."""
    announce, config = tmp_path / "ports.json", tmp_path / "router.yaml"
    config.write_text(f"model: {folder}\nlog_level: WARNING\ntimeouts: {{drain: {drain_s}}}\n")
    workers = f'workers=["{worker.address}"]'
    process = await launch("--config", str(config), "--set", workers, "--announce", str(announce))
    try:
        yield process, await read_json(announce)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_long_streams_end_whole_and_the_router_with_them(
    model_folder: Path, unified: FakeWorker, tmp_path: Path
) -> None:
    """Several times as long as anything else that the end of a router waits for, and much shorter than the drain."""
    length = int(3 * PARTING_S / unified.step_s)
    async with running(model_folder, unified, tmp_path, drain_s=900.0) as (process, ports):
        url = f"http://127.0.0.1:{ports['http']}"
        assert ports["pid"] == process.pid and len({ports["grpc"], ports["http"], ports["admin"]}) == 3
        await until_ready(f"{url}/ready")
        both = [asyncio.create_task(run(ports, url, length)) for run in (over_grpc, over_http)]
        while len(unified.active) < 2:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*both) == [expected([1], length)] * 2
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0


async def over_grpc(ports: dict[str, int], _: str, length: int) -> list[int]:
    async with channel(f"127.0.0.1:{ports['grpc']}") as ch:
        call = inference_pb2_grpc.InferenceStub(ch).Generate(request_of([1], length))
        return [token async for response in call for token in response.token_ids]


async def over_http(_: dict[str, int], url: str, length: int) -> list[int]:
    """The oracle's ids are lower-case letters of the test tokenizer."""
    body = {"prompt": [1], "max_tokens": length, "seed": 0, "stream": True}
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        text = (await client.post(f"{url}/v1/completions", json=body)).text
    assert text.endswith("data: [DONE]\n\n")
    said = "".join(event["choices"][0]["text"] for event in events(text))
    return [64 + ord(letter) - ord("a") for letter in said]


async def test_an_idle_router_leaves_at_once(model_folder: Path, unified: FakeWorker, tmp_path: Path) -> None:
    async with (
        running(model_folder, unified, tmp_path, drain_s=900) as (process, ports),
        channel(f"127.0.0.1:{ports['grpc']}") as ch,
    ):
        await until_ready(f"http://127.0.0.1:{ports['http']}/ready")
        watch = health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0, "also with a client that watches its health"


async def test_a_router_that_drains_sends_its_clients_away(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that have one address for all routers and look at no health: the Service gives them another one."""
    monkeypatch.setattr(main_module, "PARTING_S", 0.0)
    made: Cluster = await cluster(FakeWorker(UNIFIED), timeouts={"drain": 600})
    go = asyncio.Event()
    made.workers[0].script.append(waits(go, after=1))
    successor = Router(made.router.config)
    await successor.start()
    try:
        await made.until(lambda: successor.registry.ready)
        old, new = made.router, successor
        async with Proxy(f"127.0.0.1:{old.ports['grpc']}") as service, channel(service.address) as ch:
            stub = inference_pb2_grpc.InferenceStub(ch)
            call = aiter(stub.Generate(request_of([1])))
            tokens = list((await anext(call)).token_ids)
            service._port = new.ports["grpc"]  # the old one is no longer behind the Service
            stopping = asyncio.create_task(old.stop())
            await asyncio.wait_for(becomes(ch, grpc.ChannelConnectivity.IDLE), HANG_S)
            answer = await stub.Generate(request_of([1], 1)).read()
            assert list(answer.token_ids) == expected([1], 1) and not new.inference.active
            assert not stopping.done() and len(old.inference.active) == 1
            go.set()
            async for response in call:
                tokens += response.token_ids
            assert tokens == expected([1], 8)
            await asyncio.wait_for(stopping, HANG_S)
    finally:
        await successor.stop()


async def test_a_router_that_drains_closes_http_connections(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED), timeouts={"drain": 600})
    go = asyncio.Event()
    made.workers[0].script.append(waits(go, after=1))
    running = asyncio.create_task(made.generate([1], timeout=600))
    await made.until(lambda: made.workers[0].active)
    body = {"prompt": [1], "max_tokens": 1}
    assert "connection" not in (await made.http.post("/v1/completions", json=body)).headers
    stopping = asyncio.create_task(made.router.stop())
    await made.until(lambda: made.router.admission.closed)
    assert from_rpc_error((await made.generate([1])).error).reason is Reason.DRAINING
    refused = await made.http.post("/v1/completions", json=body)
    assert refused.status_code == 503 and refused.headers["connection"] == "close"
    go.set()
    assert (await running).tokens() == expected([1], 8)
    await asyncio.wait_for(stopping, HANG_S)


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
        ([], "model: required"),
        (["model=/nowhere", "grpc=here"], "grpc: "),
        (["model=/nowhere", "limits.unread=1"], "limits.unread: Input should be greater than or equal to 64"),
        (["model=m", "api_keys=keys", "http=0.0.0.0:8000"], "api_keys_plaintext=true"),
        (["model=m", "workers=[a:1]", "discovery={kind: kubernetes, kubernetes: {selector: a}}"], "kind=static, not"),
        (["model=m", "discovery.kind=kubernetes"], "discovery: kubernetes.selector: required with kind=kubernetes"),
        (["model=m", "discovery.kind=consul"], "discovery.kind: "),
        (["model=m", "routing.length_bounds=[5, 5]"], "routing.length_bounds: must be one or more token counts, asc"),
        (["model=m", "prefill_policy=fastest"], "prefill_policy: "),
        (["model=m", "bodies.held_by_tenant=1000"], "bodies.held_by_tenant: "),
        (["model=m", f"bodies={{held: {9 << 20}, held_by_tenant: {10 << 20}}}"], "bodies.held_by_tenant: "),
        *((["model=m", f"connections.cors=['{origin}']"], "must be scheme://host") for origin in NO_ORIGINS),
        (["model=m", "workers=[{address: nowhere}]"], "workers.0.address: "),
    ],
)
def test_a_bad_configuration_is_one_line_and_exit_code_2(
    items: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: str = ""
) -> None:
    monkeypatch.setattr(sys, "argv", ["millrace_router", *(f"--set={item}" for item in items)])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and words in told and file in told and told.count("\n") == 1, told


def files_of(model: type[BaseModel], *path: str) -> Iterator[tuple[str, ...]]:
    """The keys of a configuration that name a file, by their types."""
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation) or (field.annotation,):
            if kind is Path:
                yield (*path, name)
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from files_of(kind, *path, name)


DAMAGES = {"missing": None, "folder": ..., "empty": b"", "no text": b"\xff", "not YAML": b"{% a: [", "another": b"[1]"}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("path", [*files_of(RouterConfig), ("model",), ("chat_template",)], ids=".".join)
def test_a_file_that_cannot_be_used_ends_the_start(
    path: tuple[str, ...],
    damage: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever a router's configuration names. The line has the setting, or its section, and the file."""
    if path == ("chat_template",) and damage == "another":
        pytest.skip("it is a template")
    file, authority = tmp_path / "damaged", Authority()
    if isinstance(content := DAMAGES[damage], bytes):
        file.write_bytes(content)
    elif damage == "folder":
        file.mkdir()
    items = {"model": str(model_folder), ".".join(path): str(file)}
    if path[-1] in Tls.model_fields:
        items |= {f"{path[0]}.{name}": one for name, one in authority.tls(tmp_path).items() if name != path[-1]}
    if path[0] == "discovery":
        items |= {"discovery.kind": "kubernetes", "discovery.kubernetes.selector": "a=b"}
    given = [f"{key}={value}" for key, value in items.items()]
    name = path[0] if path[-1] in Tls.model_fields else ".".join(path)
    monkeypatch.setattr(main_module.logs, "setup", lambda *_: None)  # of the process
    words = f"millrace router: {name}: "
    test_a_bad_configuration_is_one_line_and_exit_code_2(given, words, monkeypatch, capsys, str(file))


def test_a_taken_port_ends_the_process(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module.logs, "setup", lambda *_: None)  # of the process
    with socket.create_server(("127.0.0.1", 0)) as taken:
        items = [f"model={model_folder}", f"grpc=127.0.0.1:{taken.getsockname()[1]}"]
        test_a_bad_configuration_is_one_line_and_exit_code_2(items, "cannot listen on", monkeypatch, capsys)
