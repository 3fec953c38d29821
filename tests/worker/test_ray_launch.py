"""The Ray launcher against a stand-in for Ray whose actors are threads of this process: our side, and ranks over TCP.
tests/e2e/test_group.py runs it with Ray itself.
"""

import asyncio
import importlib
import logging
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import msgspec
import pytest
import zmq
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Events, Request, RequestId, SamplingParams, Submit
from millrace_serve.transfer.messages import StopReader
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.ranks import Ranks
from millrace_serve.worker.messages import FromRank, GcPauses, RankFailed, RankProgress, Stop
from millrace_testing.sim import expected
from zmq.utils.monitor import recv_monitor_message

HOST = "127.0.0.1"


class FakeHandle:
    def __init__(self, actor: Any, log: list[str]) -> None:
        self._actor = actor
        self._log = log

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self._log.append(name)
            return asyncio.ensure_future(asyncio.to_thread(getattr(self._actor, name), *args))

        return types.SimpleNamespace(remote=remote)


class Group:
    async def ready(self) -> None: ...


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    ray, util = types.ModuleType("ray"), types.ModuleType("ray.util")
    strategies = types.ModuleType("ray.util.scheduling_strategies")

    def placement_group(bundles: list[dict[str, float]], strategy: str) -> Group:
        log.append(f"group of {len(bundles)}")
        return Group()

    def remote(**needs: float) -> Any:
        def wrap(cls: type) -> Any:
            def options(**_: object) -> Any:
                return types.SimpleNamespace(remote=lambda: FakeHandle(cls(), log))

            return types.SimpleNamespace(options=options)

        return wrap

    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    ray.remote = remote  # type: ignore[attr-defined]
    ray.kill = lambda actor: log.append("kill")  # type: ignore[attr-defined]
    ray.util = util  # type: ignore[attr-defined]
    ray.exceptions = types.SimpleNamespace(RayError=RuntimeError)  # type: ignore[attr-defined]
    util.get_node_ip_address = lambda: HOST  # type: ignore[attr-defined]
    ray.nodes = lambda: [{"Alive": True}, {"Alive": False}]  # type: ignore[attr-defined]
    util.placement_group = placement_group  # type: ignore[attr-defined]
    util.remove_placement_group = lambda group: log.append("remove group")  # type: ignore[attr-defined]
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: None  # type: ignore[attr-defined]
    services = types.ModuleType("ray._private.services")
    services.start_ray_process = lambda command, kind: log.append(" ".join(command))  # type: ignore[attr-defined]
    for module in (ray, util, strategies, services):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "millrace_serve.worker.ray_launch", raising=False)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield log
    logging.root.handlers[:], logging.root.level = handlers, level
    sys.modules.pop("millrace_serve.worker.ray_launch", None)


@pytest.fixture
def ray_launch(fake_ray: list[str]) -> Any:
    return importlib.import_module("millrace_serve.worker.ray_launch")


def turned_away(endpoint: str, said: Any) -> None:
    """A stranger connects and would end the worker; returns when it was turned away."""
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.set(zmq.LINGER, 0)
    events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(endpoint)
    stranger.send(msgspec.msgpack.encode(said), zmq.NOBLOCK)
    assert recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
    stranger.disable_monitor()
    context.destroy(linger=0)


async def test_ranks_as_actors_over_tcp(ray_launch: Any, fake_ray: list[str]) -> None:
    launcher = ray_launch.RayLauncher()
    config = WorkerConfig(role=Role.UNIFIED, engine="sim", dp=2, launcher="ray")
    tokens: dict[int, list[int]] = {0: [], 1: []}
    finished = asyncio.Event()
    lost: list[str] = []

    def on_events(rank: int, events: Events) -> None:
        for output in events.outputs:
            tokens[rank] += [token.token_id for token in output.tokens]
        if all(len(said) == 5 for said in tokens.values()):
            finished.set()

    others = dict.fromkeys((RankProgress, GcPauses), lambda rank, report: None)
    ranks = Ranks(config, launcher, {Events: on_events, **others}, lost.append)
    await ranks.start()
    assert ranks.info is not None
    for endpoint, said in (
        (ranks._inbox.endpoint, FromRank(0, RankFailed("I am a stranger"))),
        (ranks.info.engine_endpoint, Stop()),
        (ranks.info.reader_endpoint, StopReader()),
    ):
        await asyncio.to_thread(turned_away, endpoint, said)
    for replica in range(2):
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        request = Request(id=RequestId(replica + 1, 0), token_ids=[replica], sampling=sampling)
        ranks.send(replica, Submit(request))
    await finished.wait()
    await ranks.stop(5.0)
    assert tokens == {0: expected([0], 5), 1: expected([1], 5)}
    assert lost == []
    assert fake_ray[0] == "group of 2" and fake_ray.count("run") == 2
    assert fake_ray[-3:] == ["kill", "kill", "remove group"]


def test_rays_node_is_told_every_port_and_its_client_server_is_left_out(ray_launch: Any, fake_ray: list[str]) -> None:
    params = types.SimpleNamespace(ray_client_server_port=10001, no_monitor=False, dashboard_agent_listen_port=6383)
    ray_launch.start_hook(params, True)
    assert params.ray_client_server_port is None and params.no_monitor
    for kind in ("gcs_server", "raylet"):
        sys.modules["ray._private.services"].start_ray_process(["start", kind], kind)
    assert fake_ray == ["start gcs_server", "start raylet --dashboard_agent_listen_port=6383"]


@pytest.mark.parametrize("lacks", ["module", "function", "port"])
def test_ray_without_its_private_function_starts_by_itself(
    ray_launch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    params = types.SimpleNamespace(dashboard_agent_listen_port=6383)
    services = sys.modules["ray._private.services"]
    start = services.start_ray_process
    match lacks:
        case "module":
            monkeypatch.delitem(sys.modules, services.__name__)
        case "function":
            monkeypatch.delattr(services, "start_ray_process")
        case "port":
            del params.dashboard_agent_listen_port
    ray_launch.start_hook(params, False)
    assert params.ray_client_server_port is None and params.no_monitor
    assert "15 s" in caplog.text and getattr(services, "start_ray_process", start) is start


@pytest.mark.parametrize(("address", "host"), [("10.0.0.1", "10.0.0.1"), ("fd00::1", "[fd00::1]")])
def test_ipv6_address_stands_in_brackets(
    ray_launch: Any, monkeypatch: pytest.MonkeyPatch, address: str, host: str
) -> None:
    monkeypatch.setattr(ray_launch.ray.util, "get_node_ip_address", lambda: address)
    assert ray_launch.RayLauncher().bind() == f"tcp://{host}:*"
    rendezvous = ray_launch.endpoint(address, 29500)
    assert rendezvous == f"tcp://{host}:29500" and urlparse(rendezvous).hostname == address  # as torch reads it


@pytest.mark.parametrize("address", [HOST, "::1"])
def test_free_port_is_one_of_the_ranks_own_address(
    ray_launch: Any, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(ray_launch.ray.util, "get_node_ip_address", lambda: address)
    port = ray_launch.RankActor().free_port()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as server:
        assert server.getsockname()[:2] == (address, port)


async def test_who_waits_for_pods_says_so(
    ray_launch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_launch, "WAIT_LOG_S", 0.01)
    joined = asyncio.Event()
    with caplog.at_level(logging.WARNING):
        waiting = asyncio.create_task(ray_launch._placed(types.SimpleNamespace(ready=joined.wait), 16))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        assert caplog.messages[0] == "waiting for pods: Ray has 1, too few for 16 ranks" and not waiting.done()
        joined.set()
        await waiting


async def test_lost_rank_is_named_with_its_pod(ray_launch: Any) -> None:
    ended: list[tuple[int, str]] = []
    for error in (RuntimeError("The actor died.\nMuch more."), EOFError(), asyncio.CancelledError()):
        run = asyncio.get_running_loop().create_future()
        run.set_exception(error)
        await ray_launch._watch(3, "10.0.0.2", run, lambda *how: ended.append(how))
    hows = ("RuntimeError: The actor died.", "EOFError: ", "its actor was cancelled")
    assert ended == [(3, f"on 10.0.0.2: {how}") for how in hows]
