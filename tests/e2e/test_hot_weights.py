"""A trainer replaces the weights of a pair again and again while clients ask: every answer is of one version, whole."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import grpc
import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_cli.cluster import ClusterSpec
from millrace_cli.weights import act
from millrace_testing.client import Answer, Client, collect, until
from millrace_testing.cluster import ControlledCluster
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.other_weights import write_other
from millrace_testing.paths import TINY
from millrace_testing.procs import workers

pytestmark = [pytest.mark.long]

NEW_TOKENS = 40
CLIENTS = 4
PROMPTS = [[10 + (7 * i + n) % 500 for i in range(n)] for n in (3, 40, 65, 130, 200, 310)]
MODEL = (
    "weights_root=/",
    "dtype=float32",
    "limits={num_pages: 129, max_model_len: 512, max_prefill_tokens: 128}",
    "limits.checks=[canary, poison]",
)
CHANGED = "weights changed from version"


async def references(folder: Path, model: Path) -> list[list[int]]:
    """Of a worker that has started with this checkpoint."""
    async with workers(folder, "unified", sets=(f"model={model}", *MODEL)) as [worker], FakeLink(worker) as link:
        batch = [request(prompt, max_tokens=NEW_TOKENS) for prompt in PROMPTS]
        for one in batch:
            link.submit(one)
        ends = [await link.finish(one) for one in batch]
        assert all(end.finish_reason == common_pb2.FINISH_REASON_LENGTH for end in ends), ends
        return [link.tokens(one) for one in batch]


class Clients:
    """They ask until they are left. `said` counts whole answers by version."""

    def __init__(self, client: Client, expected: dict[str, list[list[int]]]) -> None:
        self.said: Counter[str] = Counter()
        self.ended = 0  # by a change of weights
        self.failures: list[str] = []
        self._client, self._expected = client, expected

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(first)) for first in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, version: str, number: int = 5) -> None:
        """Until so many more answers of this version have come."""
        aim = self.said[version] + number
        await until(lambda: self.said[version] >= aim or bool(self.failures), 60, f"{number} answers of {version}")
        assert not self.failures, self.failures

    async def _run(self, first: int) -> None:
        for index in itertools.islice(itertools.cycle(range(len(PROMPTS))), first, None):
            await self._ask(index)

    async def _ask(self, index: int) -> None:
        answer, version = Answer(), ""
        try:
            async for chunk in self._client.stream(PROMPTS[index], max_tokens=NEW_TOKENS, ignore_eos=True):
                collect(answer, chunk)
                version = chunk.weights_version
        except grpc.aio.AioRpcError as error:
            details, known = error.details() or "", (tokens[index] for tokens in self._expected.values())
            whole = any(answer.tokens == tokens[: len(answer.tokens)] for tokens in known)
            if CHANGED not in details or not whole or not answer.tokens:
                self.failures.append(f"{details}: {answer.tokens}")
            self.ended += 1
            return
        wanted = self._expected[version][index] if version in self._expected else None
        if wanted != answer.tokens:
            self.failures.append(f"prompt {index} with version {version!r}: {answer.tokens} and not {wanted}")
        self.said[version] += 1


async def order(
    addresses: Sequence[str], action: str, path: Path | str = "", version: str = "", drop: bool = False
) -> None:
    action = worker_pb2.WeightsAction.Value(f"WEIGHTS_ACTION_{action.upper()}")
    await act(addresses, worker_pb2.SetWeightsRequest(action=action, path=str(path), version=version, drop=drop), None)


@contextlib.asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[ControlledCluster, Clients, Path]]:
    other = write_other(tmp_path / "other", seed=1)
    expected = {"one": await references(tmp_path, TINY), "two": await references(tmp_path, other)}
    assert all(ours != theirs for ours, theirs in zip(*expected.values(), strict=True))
    # an answer may be begun anew more often than workers usually die
    spec = ClusterSpec(worker_set=MODEL, router_set=("max_attempts=64",))
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        addresses = [cluster.address(name) for name in ("prefill-0", "decode-0")]
        for action in ("pause", "load", "resume"):
            await order(addresses, action, TINY, "one")
        await cluster.wait_routable()
        async with Clients(client, expected) as clients:
            await clients.more("one")
            yield cluster, clients, other
        await client.wait_whole()


async def test_weights_of_a_pair_change_under_load(tmp_path: Path) -> None:
    """All workers at once, with running requests kept or dropped; and one worker after the other."""
    async with serving(tmp_path) as (cluster, clients, other):
        prefill, decode = (cluster.address(name) for name in ("prefill-0", "decode-0"))
        checkpoints = {"one": TINY, "two": other}
        for version, drop in (("two", False), ("one", True), ("two", True), ("one", False)):
            await order([prefill, decode], "pause", drop=drop)
            await order([prefill, decode], "load", checkpoints[version], version)
            await order([prefill, decode], "resume")
            await clients.more(version)
        for version, both in (("two", (prefill, decode)), ("one", (decode, prefill))):
            for address in both:
                for action in ("pause", "load", "resume"):
                    await order([address], action, checkpoints[version], version)
            await clients.more(version)
        assert clients.ended > 0, "no answer had begun when its weights changed"
        await order([prefill, decode], "pause")
        await asyncio.sleep(1)
        await order([prefill, decode], "resume")
        ended = clients.ended
        await clients.more("one")
        assert clients.ended == ended, "a pause alone ends nothing"


async def test_pair_sleeps_and_wakes_with_other_weights_under_load(tmp_path: Path) -> None:
    async with serving(tmp_path) as (cluster, clients, other):
        both = [cluster.address(name) for name in ("prefill-0", "decode-0")]
        await order(both, "pause", drop=True)
        await order(both, "sleep")
        await order(both, "wake", other, "two")
        await order(both, "resume")
        await clients.more("two")
