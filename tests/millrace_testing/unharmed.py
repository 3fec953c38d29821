"""A check around bad requests: afterwards a running system is what it was before."""

import re
from types import TracebackType
from typing import Self

import httpx
import psutil
from millrace_cli.cluster import LocalCluster

from millrace_testing.client import Client

ORDINARY = {"prompt": "the quick brown fox", "temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
CHECKER = "millrace_common.grammar"  # compiles in processes that come and go
TROUBLE = re.compile(r"^\S+ [EC] |Traceback", re.MULTILINE)  # lines of level ERROR and above


class Unharmed:
    """`async with Unharmed(cluster): ...` No process has ended or was started, none has logged an error, an ordinary
    request has the answer that it had before, and no worker holds a page.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> Self:
        self._family, self._logged = processes(self._cluster), self._logs()
        self._answer = await self._ask()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        await self.check()

    async def check(self) -> None:
        told = {name: text[len(self._logged[name]) :] for name, text in self._logs().items()}
        trouble = {name: text[found.start() :][:3000] for name, text in told.items() if (found := TROUBLE.search(text))}
        assert not trouble, trouble
        assert processes(self._cluster) == self._family
        assert await self._ask() == self._answer
        async with Client(self._cluster.grpc_address, self._cluster.admin_address) as client:
            await client.wait_whole()

    async def _ask(self) -> object:
        async with httpx.AsyncClient(base_url=self._cluster.http_url, timeout=None) as http:
            answer = await http.post("/v1/completions", json=ORDINARY)
            assert (await http.get("/ready")).status_code == 200
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def _logs(self) -> dict[str, str]:
        return {name: one.log_path.read_text(errors="replace") for name, one in self._cluster.processes.items()}


def processes(cluster: LocalCluster) -> dict[str, set[tuple[int, float]]]:
    """By name, with their children: pid and start of each."""
    found = {}
    for name, process in cluster.processes.items():
        main = psutil.Process(process.pid)
        family = [one for one in (main, *main.children(recursive=True)) if CHECKER not in " ".join(one.cmdline())]
        found[name] = {(one.pid, one.create_time()) for one in family}
    return found
