"""A model through a prefill and a decode worker of unequal ranks: the answers are those of one unified rank. Of sparse
attention, index keys travel with the latent rows.

Ranks of the prefill worker share experts, or the chunks of one prompt, with the decode worker's doing neither.

Pages hold every KV row on all ranks of a replica, so two ranks may read from one, and one from two. A page that came
from the wrong rank, replica or place would change every later log-probability.
"""

import asyncio
from pathlib import Path

import pytest
from engine.drafting import COUNTED, GREEDY, SEEDED, questions
from millrace.v1 import worker_pb2
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.paths import ROOT, TINY
from millrace_testing.procs import workers
from millrace_testing.reference import Continuation, assert_same
from millrace_testing.sparse import write_sparse

PAGE = 64
LIMITS = (
    "limits={num_pages: 129, max_model_len: 512, max_prefill_tokens: 96, max_running: 12, "
    "checks: [checksum, canary, poison]}"
)
TINY_FP8 = ROOT / "models" / "generated" / "tiny-fp8"  # by `make checkpoint`
KINDS = (GREEDY, SEEDED, COUNTED)


def prompts() -> list[list[int]]:
    """Questions of one page and less, and three that take several chunks, two of which begin with the same pages."""
    asked = questions()
    shared = [10 + 7 * i % 500 for i in range(2 * PAGE + 5)]
    return [*asked, shared + asked[0], shared + asked[1], [20 + 3 * i % 700 for i in range(4 * PAGE)] + asked[2]]


def requests(given: list[list[int]]) -> list[worker_pb2.EngineRequest]:
    return [request(p, max_tokens=16, logprobs=0, **KINDS[i % len(KINDS)]) for i, p in enumerate(given)]


async def said(link: FakeLink, asked: list[worker_pb2.EngineRequest]) -> list[Continuation]:
    await asyncio.gather(*(link.finish(r) for r in asked))
    of = [[token.sampled.logprob for output in link.of(r) for token in output.logprobs] for r in asked]
    return [Continuation(link.tokens(r), logprobs) for r, logprobs in zip(asked, of, strict=True)]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_sparse(tmp_path / "sparse") if request.param == "sparse" else request.param


@pytest.fixture
def of_one_rank(model: Path, tmp_path: Path) -> list[Continuation]:
    given = prompts()  # before a loop runs

    async def run() -> list[Continuation]:
        async with workers(tmp_path, "unified", sets=(f"model={model}", LIMITS)) as [one], FakeLink(one) as link:
            asked = requests(given)
            for r in asked:
                link.submit(r)
            return await said(link, asked)

    return asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "drafts", "model"),
    [
        ("tp=2 expert_tp=true", "dp=2", 2, TINY_FP8),
        ("dp=2 limits.context_parallel_tokens=60", "tp=2", 0, TINY),
        ("tp=2", "dp=2", 2, "sparse"),
    ],
    indirect=["model"],
)
async def test_answers_through_unequal_ranks_are_those_of_one(
    prefill_ranks: str, decode_ranks: str, drafts: int, model: Path, of_one_rank: list[Continuation], tmp_path: Path
) -> None:
    """Twice: the second time the prefill worker has the prompts in its cache, and another replica decodes."""
    given, sets = prompts(), (f"model={model}", LIMITS, f"limits.draft_tokens={drafts}")
    async with (
        workers(tmp_path, "prefill", sets=(*sets, *prefill_ranks.split())) as [prefill],
        workers(tmp_path, "decode", sets=(*sets, decode_ranks)) as [decode],
        FakePair(prefill, decode) as both,
    ):
        theirs, ours = (await prefill.info()).replicas, (await decode.info()).replicas
        assert {theirs, ours} == {1, 2}
        for turn in range(2):
            asked = requests(given)
            for i, r in enumerate(asked):
                r.replica = i % theirs
                both.submit(r, decode_replica=(i + turn) % ours)
            assert_same(await said(both.to_decode, asked), of_one_rank)
            cached = [both.to_prefill.of(r)[0].cached_tokens for r in asked]
            assert turn == 0 or cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in given]
            accepted = sum(both.to_decode.of(r)[-1].accepted_draft_tokens for r in asked)
            assert (accepted > 0) is (drafts > 0)
        await prefill.whole()
        load = await decode.whole()
        assert all(replica.counters["output_tokens"] for replica in load.replicas), "a replica had nothing to do"
