"""Honest tenants, in turns alone and beside one that is hostile (hostile_tenant.py): `make chaos ARGS=--hostile`.

Each answer is compared token by token. Nothing may be wrong or refused, no process may end, and the 99th percentiles of
the time to the first token and of the gaps between messages may grow by a fifth.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from millrace.v1 import common_pb2, inference_pb2
from millrace_cli.cluster import TINY, ClusterSpec, LocalCluster
from millrace_load.record import percentile
from millrace_router.text.tokenizer import Tokenizer
from millrace_rpc.errors import from_rpc_error
from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SPECIAL_TOKENS, SimSettings

from millrace_testing.client import Client
from millrace_testing.oracle import oracle_outputs
from millrace_testing.paths import ROOT
from millrace_testing.unharmed import processes

MOST = 1.2  # times the 99th percentile of the turns without the hostile tenant
OUTPUTS, PROMPTS = 40, (50, 300)  # tokens
VOCABULARY = 1000
TURN_S = 15.0
SETTLE_S = 2.0  # of a turn, before anything is measured
HOSTILE, HONEST = tuple(f"hostile-{i:02}" for i in range(22)), ("honest-a", "honest-b")
RIGHTS = {  # of each hostile tenant
    **{"requests_per_s": 0.2, "tokens_per_s": 200.0},
    **{"max_concurrent": 2, "max_tokens_in_flight": 8192},
}
WORKER_SET = (
    # The step of a large model: on two cores a shorter one measures how processes share them.
    *("sim.step_s=0.04", "sim.token_s=0.00001", f"sim.vocab_size={VOCABULARY}", "limits.checks=[canary]"),
    "limits.max_model_len=4096",
)
SIM = SimSettings(vocab_size=VOCABULARY)


def secret(name: str) -> str:
    return f"sk-{name}-0123456789-0123456789-0123456789"


@dataclass(slots=True)
class Seen:
    """Of the honest tenants in the turns of a kind."""

    first: list[float] = field(default_factory=list)  # seconds to the first token
    gaps: list[float] = field(default_factory=list)  # seconds between messages

    def p99(self) -> tuple[float, float]:
        return percentile(sorted(self.first), 0.99), percentile(sorted(self.gaps), 0.99)


@dataclass(slots=True)
class Report:
    seen: dict[tuple[str, bool], Seen] = field(default_factory=dict)  # by API, and whether the hostile tenant was there
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)  # processes
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)  # by attack

    def take(self, outcomes: dict[str, dict[str, int]]) -> None:
        for name, found in outcomes.items():
            self.outcomes.setdefault(name, Counter()).update(found)

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for api in ("HTTP", "gRPC"):
            alone, beside = self.seen[api, False], self.seen[api, True]
            for what, before, after in zip(("first token", "gap"), alone.p99(), beside.p99(), strict=True):
                count = len(beside.first if what == "first token" else beside.gaps)
                row = {"api": api, "what": what, "alone_p99_s": before, "beside_p99_s": after, "samples": count}
                found.append({**row, "ratio": after / before})
        return found

    def broken(self) -> list[str]:
        """The bounds that do not hold."""
        slow = [f"{row['api']}, {row['what']}: {row['ratio']:.2f} times" for row in self.rows() if row["ratio"] > MOST]
        refused = [f"{count} honest requests ended with {reason}" for reason, count in self.refused.items()]
        return [*slow, *self.wrong, *refused, *self.ended]

    def results(self) -> dict[str, Any]:
        return {
            "rows": self.rows(),
            "wrong": len(self.wrong),
            "refused": dict(self.refused),
            "ended": len(self.ended),
            "outcomes": {name: dict(found) for name, found in self.outcomes.items()},
        }

    def table(self) -> str:
        lines = ["| API | p99 of | alone | beside | ratio |", "|---|---|---|---|---|"]
        for row in self.rows():
            times = f"{1e3 * row['alone_p99_s']:.0f} ms | {1e3 * row['beside_p99_s']:.0f} ms | {row['ratio']:.2f}"
            lines.append(f"| {row['api']} | {row['what']} | {times} |")
        lines += ["", "| attack | outcomes |", "|---|---|"]
        for name, found in self.outcomes.items():
            lines.append(f"| {name} | {', '.join(f'{count} × {what}' for what, count in found.most_common())} |")
        return "\n".join(lines)


class Honest:
    """Clients that ask, read and think, half of them by each API."""

    def __init__(self, cluster: LocalCluster, report: Report, clients: int, seed: int) -> None:
        self._client = Client(cluster.grpc_address)
        self._http = httpx.AsyncClient(base_url=cluster.http_url, timeout=60)
        self._report, self._rng = report, random.Random(seed)
        self._turns = itertools.count()
        self._tokenizer = Tokenizer.load(TINY)
        self.seen: dict[str, Seen] | None = None  # None: nothing is measured now
        self._stopping = False
        asks = (("HTTP", self._by_http), ("gRPC", self._by_grpc))
        self._tasks = [asyncio.create_task(self._run(*asks[i % 2])) for i in range(clients)]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()
        await self._client.__aexit__()

    async def _run(self, api: str, ask: Callable[[str, list[int], Callable[[], None]], Any]) -> None:
        while not self._stopping:
            await asyncio.sleep(self._rng.expovariate(2.0))
            prompt = self._rng.choices(range(SPECIAL_TOKENS, VOCABULARY), k=self._rng.randint(*PROMPTS))
            wanted = oracle_outputs(prompt, SamplingParams(max_tokens=OUTPUTS, temperature=0.0, ignore_eos=True), SIM)
            seen, times = self.seen, [time.perf_counter()]
            key = secret(HONEST[next(self._turns) % len(HONEST)])
            answer, why = await ask(key, prompt, lambda times=times: times.append(time.perf_counter()))
            if why:
                self._report.refused[why] += 1
            elif answer != (wanted if api == "gRPC" else self._tokenizer.decode(wanted, keep_special=False)):
                self._report.wrong.append(f"{api}: {answer!r} in place of {wanted}")
            elif seen is not None and seen is self.seen:
                seen[api].first.append(times[1] - times[0])
                seen[api].gaps += [after - before for before, after in itertools.pairwise(times[1:])]

    async def _by_grpc(self, key: str, prompt: list[int], told: Callable[[], None]) -> tuple[list[int] | str, str]:
        request = inference_pb2.GenerateRequest(
            prompt={"token_ids": {"ids": prompt}},
            sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True),
        )
        tokens: list[int] = []
        try:
            async for chunk in self._client.stub.Generate(
                request, metadata=(("authorization", f"Bearer {key}"),), timeout=60
            ):
                told()
                tokens += chunk.token_ids
        except grpc.aio.AioRpcError as error:
            return tokens, str(from_rpc_error(error).reason)
        return tokens, ""

    async def _by_http(self, key: str, prompt: list[int], told: Callable[[], None]) -> tuple[list[int] | str, str]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": OUTPUTS, "ignore_eos": True, "stream": True}
        headers, text = {"authorization": f"Bearer {key}"}, ""
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    return text, str(answer.status_code)
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        told()
                        text += json.loads(line[6:])["choices"][0]["text"]
        except httpx.HTTPError as error:
            return text, type(error).__name__
        return text, ""


async def beside_hostile(folder: Path, minutes: float, clients: int, seed: int) -> Report:
    """Turns of TURN_S, alternately without and with the hostile tenant."""
    report = Report()
    keys, deployment = folder / "keys.yaml", folder / "secret"
    rights = {**dict.fromkeys(HOSTILE, RIGHTS), **{name: {} for name in HONEST}}
    keys.write_text(json.dumps({"keys": [{"name": name, "key": secret(name), **rights[name]} for name in rights]}))
    deployment.write_text("0123456789abcdef0123456789abcdef")
    spec = ClusterSpec(
        engine="sim",
        log_dir=folder / "logs",
        router_set=(f"api_keys={keys}", f"secret={deployment}"),
        worker_set=WORKER_SET,
    )
    async with LocalCluster(spec) as cluster:
        before = processes(cluster)
        honest = Honest(cluster, report, clients, seed)
        for turn in range(max(round(60 * minutes / TURN_S / 2), 1) * 2):
            async with AsyncExitStack() as stack:
                if turn % 2:
                    await stack.enter_async_context(_Hostile(cluster, report))
                await asyncio.sleep(SETTLE_S)
                honest.seen = {api: report.seen.setdefault((api, bool(turn % 2)), Seen()) for api in ("HTTP", "gRPC")}
                await asyncio.sleep(TURN_S)
                honest.seen = None
        await honest.stop()
        after = processes(cluster)
        report.ended = [f"{name} has ended, or was started again" for name, one in before.items() if after[name] != one]
        async with Client(cluster.grpc_address, cluster.admin_address) as client:
            await client.wait_whole(timeout=60)
    return report


class _Hostile:
    """The hostile process, on what time of the machine the others leave: elsewhere it would have one of its own."""

    def __init__(self, cluster: LocalCluster, report: Report) -> None:
        self._report = report
        module = (sys.executable, "-m", "millrace_testing.hostile_tenant")
        self._command = ("nice", "-n", "19", *module, cluster.http_url, cluster.grpc_address, *map(secret, HOSTILE))

    async def __aenter__(self) -> None:
        path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=pipe, env={**os.environ, "PYTHONPATH": path}
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(120):
            assert await self._process.stdout.readline() == b"ready\n"

    async def __aexit__(self, *_: object) -> None:
        assert self._process.returncode is None, "the hostile tenant has ended by itself"
        self._process.send_signal(signal.SIGTERM)
        said, _ = await asyncio.wait_for(self._process.communicate(), 60)
        self._report.take(json.loads(said))
