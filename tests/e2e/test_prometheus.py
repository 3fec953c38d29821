"""Dashboards and alerts against a real Prometheus that scrapes real processes with the embedded checkpoint.

The system is loaded, then a few faults are inflicted on it, each until the alerts meant for it fire. All rules are
played to Prometheus's rule tester in tests/dashboards/test_rules.py.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_cli.cluster import ClusterSpec
from millrace_dashboards import alerts, files
from millrace_dashboards.alert import Alert, Deployment, Thresholds
from millrace_dashboards.boards import dashboards
from millrace_dashboards.grafana import Query
from millrace_dashboards.promql import CATALOGUE
from millrace_rpc.client import channel
from millrace_testing.cluster import ControlledCluster, with_workers
from millrace_testing.faulty_worker import FLAG
from millrace_testing.procs import PYTHONPATH
from millrace_testing.prometheus import Prometheus, Target, free_port, needs_prometheus

pytestmark = [needs_prometheus]

KEY = "sk-prometheus-4c1f-0123456789abcdef"
OF = Deployment("test", "tiny", "blue")
THRESHOLDS = Thresholds(
    window="8s",
    long_window="2m",
    restart_window="2m",
    patience="0s",
    ttft=1.0,
    gc_pause=0.025,
    loop_lag=0.25,
    restarts=1,
)
# What a slow or busy machine can raise without any fault, and KvSlow: pages of the embedded model are small.
OF_TIME = {
    "FirstTokenSlow",
    "TokensSlow",
    "QueueGrows",
    "KvSlow",
    "GcPauses",
    "EventLoopLags",
    "LeasesExpire",
}
# Panels whose queries may find nothing: what they count has not happened.
MAY_BE_EMPTY = {
    "Messages for unknown attempts": "no message was late",
    "Stale messages": "no message was late",
    **dict.fromkeys(("Accepted by place", "Drafts verified", "Drafts accepted by pair", "Accept length"), "no drafts"),
    **dict.fromkeys(
        ("Pages on their way back", "Prefix fetches without pages"), "routers name no source with this policy"
    ),
    **dict.fromkeys(("Duties", "Requests within limits"), "no worker is flexible"),
    "Ejections": "nobody is far off the others where there is one of each role",
}


class System:
    """The cluster, what scrapes it, and its clients."""

    def __init__(self, cluster: ControlledCluster, prometheus: Prometheus, keys: Path, fault: Path) -> None:
        self.cluster = cluster
        self.prometheus = prometheus
        self.keys = keys
        self.fault = fault

    async def ask(self, random: random.Random) -> None:
        """One request; how it ends is the metrics' affair."""
        ids = [random.randrange(5, 1024) for _ in range(random.randint(100, 300))]
        request = inference_pb2.GenerateRequest(
            prompt={"token_ids": {"ids": ids}}, sampling={"max_tokens": 12, "ignore_eos": True}
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in self._stub.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),)):
                pass

    async def keep_asking(self, seed: int) -> None:
        own = random.Random(seed)
        while True:
            await self.ask(own)
            await asyncio.sleep(0.02)

    async def until_fired(self, names: set[str]) -> None:
        await self.prometheus.until_fired(prefixed(names))

    @contextlib.asynccontextmanager
    async def clients(self, number: int) -> AsyncIterator[None]:
        async with channel(self.cluster.grpc_address) as ch:
            self._stub = inference_pb2_grpc.InferenceStub(ch)
            tasks = [asyncio.create_task(self.keep_asking(seed)) for seed in range(number)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


def watched() -> list[Alert]:
    """All but those of GPUs, which need an exporter that is not here."""
    return [
        rule for name, group in alerts.groups(THRESHOLDS, OF.matchers).items() if name != alerts.GPUS for rule in group
    ]


def prefixed(names: set[str]) -> set[str]:
    return {f"Millrace{name}" for name in names}


def targets(cluster: ControlledCluster) -> dict[str, Target]:
    """By name, with the labels that the chart's monitors set."""
    made = {}
    for name, role in cluster.roles.items():
        made[name] = Target(
            cluster.address(name, "metrics"),
            {**dataclasses.asdict(OF), "component": role, "pod": name},
        )
    return made


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[System]:
    keys, fault = tmp_path / "keys.json", tmp_path / "kv-fault"
    keys.write_text(json.dumps({"keys": [{"name": "team-a", "key": KEY}]}))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv(FLAG, str(fault))
    spec = ClusterSpec(
        command=with_workers("faulty_worker"),
        log_dir=tmp_path / "logs",
        # A worker warms up with prompts of a whole step: small ones save seconds.
        worker_set=(
            "limits.max_prefill_tokens=512",
            "limits.host_cache_gib=0.05",
            f"limits.disk_cache={tmp_path / 'kv'}",
            "timeouts.lease=0.15",
        ),
        router_set=(
            f"api_keys={keys}",
            "api_keys_keep=true",
            f"metrics=127.0.0.1:{free_port()}",  # the same after a restart, as in a pod
            "queue_size=20",
            "timeouts.silence=10",
            "timeouts.no_workers=60",
        ),
    )
    rules = files.rendered(THRESHOLDS, of=OF)["alerts.yaml"]
    async with (
        ControlledCluster(spec) as cluster,
        Prometheus(tmp_path / "prometheus", rules, targets(cluster).values()) as prometheus,
    ):
        yield System(cluster, prometheus, keys, fault)


@pytest.mark.long
async def test_panels_and_alerts(system: System) -> None:
    async with system.clients(4):
        await healthy(system)
        await transfers_fail(system)
        await files_break(system)
        await panels_have_data(system.prometheus)
        await workers_die(system)
        await router_restarts(system)


# ------------------------------------------------------------------------------------------------ no fault


async def healthy(system: System) -> None:
    """Rules are accepted and their values have data. None fires that does not depend on the machine's speed."""
    prometheus = system.prometheus
    rules = watched()
    missing = {rule.name: rule.value for rule in rules}
    noisy: set[str] = set()

    async def all_have_data() -> bool:
        for name, value in list(missing.items()):
            if await prometheus.query(value):
                del missing[name]
        return not missing

    async def quiet() -> bool:
        noisy.clear()
        noisy.update(prefixed({rule.name for rule in rules} - OF_TIME) & await prometheus.firing())
        return not noisy

    await prometheus.until(all_have_data, lambda: f"data of {sorted(missing)}")
    await prometheus.until(quiet, lambda: f"the end of {sorted(noisy)}")
    loaded = await prometheus.rules()
    alerting = {rule["name"] for rule in loaded if rule["type"] == "alerting"}
    assert prefixed({rule.name for rule in rules}) <= alerting
    for name in (name for group in alerts.recordings(OF.matchers).values() for name in group):
        assert await prometheus.query(name), name
    assert [rule for rule in loaded if rule["health"] != "ok"] == []


async def panels_have_data(prometheus: Prometheus) -> None:
    """Every query parses and finds something, or names a metric that exists and a reason why it is empty."""
    known = await prometheus.metrics()
    empty = {}
    for board in dashboards(THRESHOLDS):
        for panel in (panel for row in board.rows for panel in row.panels if row.title != "GPUs"):
            for query in panel.queries:
                if not await prometheus.query(as_grafana(query)):
                    empty[panel.title] = query.expr
    assert empty.keys() <= MAY_BE_EMPTY.keys(), {title: empty[title] for title in empty.keys() - MAY_BE_EMPTY.keys()}
    assert {row.name for row in CATALOGUE.values()} <= known


def as_grafana(query: Query) -> str:
    values = {"$__rate_interval": "2m", "$namespace": "test", "$release": "blue"}
    values |= dict.fromkeys(("$model", "$role", "$pod"), ".*")
    expr = query.expr
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


# ------------------------------------------------------------------------------------------------ faults


async def transfers_fail(system: System) -> None:
    system.fault.touch()
    await system.until_fired({"KvTransfersFail", "Retries", "Errors", "ManyErrors"})
    system.fault.unlink()


async def files_break(system: System) -> None:
    """A key file that cannot be read: the old keys hold, so the clients notice nothing."""
    good = system.keys.read_text()
    system.keys.write_text("keys: [")
    await system.until_fired({"FilesNotUsed"})
    system.keys.write_text(good)


async def workers_die(system: System) -> None:
    await system.cluster.kill("prefill-0")
    await system.until_fired({"NotReady", "WorkersNotRoutable"})


async def router_restarts(system: System) -> None:
    await system.cluster.kill("router")
    await system.until_fired({"RoutersGone", "RouterDown"})
    await system.cluster.restart("router")
    await system.until_fired({"Restarts"})
