"""Fixtures: a started router over whichever fake workers a test wants."""

import contextlib
import copy
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from millrace.v1 import admin_pb2_grpc, inference_pb2_grpc
from millrace_common import gc_hooks
from millrace_common.grammar.checker import Checker
from millrace_router import main
from millrace_router.config import RouterConfig
from millrace_router.fleet.warmups import PairStage
from millrace_router.flow import grammars
from millrace_router.text.tokenizer import Tokenizer
from millrace_rpc.client import channel
from millrace_testing import HANG_S
from millrace_testing.certificates import few_authorities  # noqa: F401
from millrace_testing.hasty import hasty_servers
from router.fake_worker import DECODE, PREFILL, FakeWorker
from router.harness import Cluster, write_tokenizer
from router.scripted import write_formats


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


ANYBODY = httpx.create_ssl_context(verify=False)  # trusted; its certificates take long to read


class SharedChecker(Checker):
    def close(self) -> None:
        pass  # its processes go on for the next router


@pytest.fixture(scope="session", autouse=True)
def one_checker() -> Iterator[None]:
    """The processes in which grammars compile start once for all routers."""
    shared = SharedChecker(grammars.PROCESSES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "Checker", lambda processes: shared)
        yield
    Checker.close(shared)


@pytest.fixture(scope="session", autouse=True)
def one_tokenizer() -> Iterator[None]:
    """A tokenizer, half of what a router's start takes, is read once. Each router has a copy that a test may change."""
    load = functools.cache(Tokenizer.load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "Tokenizer", SimpleNamespace(load=lambda *given: copy.copy(load(*given))))
        yield


@pytest.fixture
async def cluster(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable]:
    """`await cluster(FakeWorker(PREFILL), …, timeouts={…})`: started, and routable unless wait=False."""
    # A router freezes its process. This one would keep the garbage of all tests, and count it at each start.
    monkeypatch.setattr(gc_hooks, "freeze", lambda: 2000)
    hasty_servers(monkeypatch)
    async with contextlib.AsyncExitStack() as stack:

        async def start(*workers: FakeWorker, wait: bool = True, **settings: object) -> Cluster:
            for worker in workers:
                await worker.start()
                stack.push_async_callback(worker.stop)
            patient = dict.fromkeys(("no_workers", "silence", "client"), HANG_S)
            timeouts = {"drain": 1.0, **patient, **settings.pop("timeouts", {})}
            given = {"model": str(model_folder), "workers": [w.address for w in workers], "timeouts": timeouts}
            config = RouterConfig.model_validate(given | settings)
            router = main.Router(config)
            await router.start()
            stack.push_async_callback(router.stop)
            public = await stack.enter_async_context(channel(f"127.0.0.1:{router.ports['grpc']}"))
            admin = await stack.enter_async_context(channel(f"127.0.0.1:{router.ports['admin']}"))
            url = f"http://127.0.0.1:{router.ports['http']}"
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S, verify=ANYBODY))
            stubs = inference_pb2_grpc.InferenceStub(public), admin_pb2_grpc.AdminStub(admin)
            made = Cluster(router, list(workers), public, *stubs, http)
            if wait:
                await made.until(lambda: all(status.routable for status in router.registry.status()))
                # A worker is routable with its first pair; until the others are ready, not every worker is a choice.
                busy, progress = {PairStage.WARMING, PairStage.FREEZING}, router.registry.warmups.progress
                await made.until(lambda: not any(it.stage in busy for it in progress.values()))
            return made

        yield start


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_formats(tmp_path_factory.mktemp)


@pytest.fixture
async def serve(cluster: Callable, folders: dict[str, Path]) -> Callable:
    async def start(form: str, **settings: object) -> Cluster:
        workers = FakeWorker(PREFILL), FakeWorker(DECODE)
        for worker in workers:
            worker.context = 4096  # tools take many tokens of one byte
        return await cluster(*workers, model=str(folders[form]), **settings)

    return start


@pytest.fixture
async def pair(cluster: Callable) -> Cluster:
    return await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
