"""The Ray launcher against a stand-in for Ray whose actors are threads of this process: our side, and ranks over TCP.
Ray itself is not installed where the tests run.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Events, Request, RequestId, SamplingParams, Submit
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.ranks import Ranks
from millrace_testing.sim import expected


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
    util.get_node_ip_address = lambda: "127.0.0.1"  # type: ignore[attr-defined]
    util.placement_group = placement_group  # type: ignore[attr-defined]
    util.remove_placement_group = lambda group: log.append("remove group")  # type: ignore[attr-defined]
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: None  # type: ignore[attr-defined]
    for module in (ray, util, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "millrace_serve.worker.ray_launch", raising=False)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield log
    logging.root.handlers[:], logging.root.level = handlers, level
    sys.modules.pop("millrace_serve.worker.ray_launch", None)


async def test_ranks_as_actors_over_tcp(fake_ray: list[str]) -> None:
    launcher = importlib.import_module("millrace_serve.worker.ray_launch").RayLauncher()
    config = WorkerConfig(role=Role.UNIFIED, engine="sim", dp=2, launcher="ray")
    tokens: dict[int, list[int]] = {0: [], 1: []}
    finished = asyncio.Event()
    lost: list[str] = []

    def on_report(rank: int, report: object) -> None:
        for output in report.outputs if isinstance(report, Events) else ():
            tokens[rank] += [token.token_id for token in output.tokens]
        if all(len(said) == 5 for said in tokens.values()):
            finished.set()

    ranks = Ranks(config, launcher, on_report, lost.append)
    async with asyncio.timeout(20):
        await ranks.start()
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
