"""A model of sparse attention through a prefill and a decode worker: index keys travel with the latent rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from handover.test_topologies import LIMITS, PAGE, prompts, said
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.procs import workers
from millrace_testing.reference import Continuation, assert_same
from millrace_testing.sparse import write_sparse


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse") / "model")


@pytest.fixture(scope="module")
def of_one_worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Continuation]:
    given = prompts()  # before a loop runs

    async def run() -> list[Continuation]:
        folder = tmp_path_factory.mktemp("one")
        async with workers(folder, "unified", sets=(f"model={model}", LIMITS)) as [one], FakeLink(one) as link:
            asked = [request(prompt, max_tokens=16, logprobs=0, temperature=0.0) for prompt in given]
            for r in asked:
                link.submit(r)
            return await said(link, asked)

    return asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["tp=1", "tp=2"])
async def test_answers_are_those_of_one_worker(
    ranks: str, model: Path, of_one_worker: list[Continuation], tmp_path: Path
) -> None:
    """Twice: the second time from the prefill worker's cache. The decode worker drafts."""
    given, sets = prompts(), (f"model={model}", LIMITS, "limits.draft_tokens=2")
    async with (
        workers(tmp_path, "prefill", sets=(*sets, ranks)) as [prefill],
        workers(tmp_path, "decode", sets=sets) as [decode],
        FakePair(prefill, decode) as both,
    ):
        for turn in range(2):
            asked = [request(prompt, max_tokens=16, logprobs=0, temperature=0.0) for prompt in given]
            for r in asked:
                both.submit(r)
            assert_same(await said(both.to_decode, asked), of_one_worker)
            cached = [both.to_prefill.of(r)[0].cached_tokens for r in asked]
            assert turn == 0 or cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in given]
        await prefill.whole()
        await decode.whole()
