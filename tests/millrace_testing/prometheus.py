"""A real Prometheus server on loopback: any that is on PATH, or the one that `make test` unpacks."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml
from millrace_cli.process import EXEC_GUARD

from millrace_testing import HANG_S
from millrace_testing.paths import ROOT

UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin"
FOUND = {
    name: shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), str(UNPACKED))))
    for name in ("prometheus", "promtool")
}
needs_prometheus = pytest.mark.skipif(
    None in FOUND.values(),
    reason="needs `prometheus` and `promtool`, on PATH or where `make test` unpacks Debian's package",
)
INTERVAL = "1s"  # of scrapes and of rules


def binary(name: str) -> str:
    found = FOUND[name]
    assert found is not None, "mark the test with needs_prometheus"
    return found


@dataclass(frozen=True)
class Target:
    address: str  # host:port
    labels: Mapping[str, str]


def free_port() -> int:
    """For servers that cannot say which port they took. Below those that the kernel gives to clients: one of them would
    take it before the server does.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


class Prometheus:
    """`async with Prometheus(folder, rules, targets) as prometheus`. `rules` is the text of a rule file."""

    def __init__(self, folder: Path, rules: str, targets: Iterable[Target]) -> None:
        self._folder = folder
        self._rules = rules
        self._targets = list(targets)

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        address = f"127.0.0.1:{free_port()}"
        (self._folder / "rules.yaml").write_text(self._rules)
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(self._config()))
        self.scrape(self._targets)
        log = (self._folder / "prometheus.log").open("wb")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", str(EXEC_GUARD), str(os.getpid())),
            *(
                binary("prometheus"),
                f"--config.file={self._folder}/prometheus.yaml",
                f"--storage.tsdb.path={self._folder}/tsdb",
            ),
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        )
        log.close()
        self._http = httpx.AsyncClient(base_url=f"http://{address}/", timeout=20)
        await self.until(self._is_up, "Prometheus serves")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()

    def scrape(self, targets: Iterable[Target]) -> None:
        """These from now on."""
        groups = [{"targets": [target.address], "labels": dict(target.labels)} for target in targets]
        draft = self._folder / "targets.draft"
        draft.write_text(json.dumps(groups))
        draft.replace(self._folder / "targets.json")

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant vector (or scalar). Fails where it does not parse."""
        answer = (await self._http.get("api/v1/query", params={"query": expr})).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        data = answer["data"]
        return data["result"] if data["resultType"] == "vector" else [{"value": data["result"]}]

    async def range(self, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Series with their samples from `start` to `end`, Unix times."""
        asked = {"query": expr, "start": start, "end": end, "step": step_s}
        answer = (await self._http.post("api/v1/query_range", data=asked)).json()
        assert answer["status"] == "success", f"{expr}: {answer.get('error')}"
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    async def metrics(self) -> set[str]:
        """Names of all metrics that targets describe, also of those without a sample."""
        return set((await self._http.get("api/v1/metadata")).json()["data"])

    async def rules(self) -> list[dict[str, Any]]:
        groups = (await self._http.get("api/v1/rules")).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def firing(self) -> set[str]:
        alerts = (await self._http.get("api/v1/alerts")).json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    async def until_fired(self, names: Iterable[str], timeout_s: float = HANG_S) -> None:
        """Until each of these alerts has been firing at some moment from now on."""
        missing = set(names)

        async def fired() -> bool:
            missing.difference_update(await self.firing())
            return not missing

        await self.until(fired, lambda: f"firing: {sorted(missing)}", timeout_s)

    async def until(self, condition: Any, what: Any, timeout_s: float = HANG_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not await condition():
            assert self._process.returncode is None, (self._folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, f"waiting for {what() if callable(what) else what}"
            await asyncio.sleep(0.2)

    async def _is_up(self) -> bool:
        try:
            return (await self._http.get("-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    def _config(self) -> dict[str, Any]:
        files = [{"files": [f"{self._folder}/targets.json"], "refresh_interval": "1s"}]
        return {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [f"{self._folder}/rules.yaml"],
            "scrape_configs": [{"job_name": "millrace", "file_sd_configs": files}],
        }
