"""Prefill -> decode equals unified equals transformers.generate, token for token and with the same probabilities.

Pages carry the hash of their tokens, freed pages are filled with NaN, and both are checked before every step: an answer
that is right cannot have read another request's KV.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from millrace_bench.tasks import TASKS
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_testing.client import Answer, Client
from millrace_testing.cluster import SMALL
from millrace_testing.inside_cluster import InsideCluster
from millrace_testing.paths import TINY
from millrace_testing.reference import Continuation, assert_greedy

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 300, 1000)
NEW_TOKENS = 16
CONCURRENCY = 16
PART = 0.12  # of a GPU: up to five workers share one, perhaps beside other programs

# In BF16 with FP8 products a sum in another order may turn an almost even choice, and all that follows it: of random
# prompts most, of questions that the model was trained to answer next to none.
FP8_QUESTIONS = {"copy": 8, "sort": 4, "retrieval_1k": 4}  # of a task
MOST_DIFFERENT = 1  # of their answers
LARGEST_SHIFT = 0.05  # mean difference of the log-probabilities of equal ones

pytestmark = pytest.mark.asyncio(loop_scope="module")
# Where every kernel is compiled at the first start.
ON_GPU = (pytest.mark.gpu, pytest.mark.timeout(1500))


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    lengths = [*LENGTHS, *(rng.randrange(1, 400) for _ in range(CONCURRENCY - len(LENGTHS)))]
    return [[rng.randrange(10, 1000) for _ in range(length)] for length in lengths]


@pytest.fixture(
    scope="module", params=["cpu", *(pytest.param(text, marks=ON_GPU) for text in ("cuda", "cuda tp=2", "cuda dp=2"))]
)
def worker_set(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Of every worker: a device, and how many GPUs of it compute together."""
    device, *ranks = request.param.split()
    needed = 1 + len(ranks)  # one for each rank of a worker; all workers share them
    if device == "cuda" and torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA device(s)")
    chosen = (f"device={device}", f"memory_fraction={PART}", *ranks)
    return (*chosen, *SMALL, "dtype=float32", "limits.checks=[canary, poison]")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(worker_set: tuple[str, ...]) -> AsyncIterator[Client]:
    async with (
        InsideCluster(ClusterSpec(worker_set=worker_set)) as cluster,
        Client(cluster.grpc_address, cluster.admin_address) as client,
    ):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unified(worker_set: tuple[str, ...]) -> AsyncIterator[Client]:
    async with (
        InsideCluster(ClusterSpec(prefill=0, decode=0, unified=1, worker_set=worker_set)) as cluster,
        Client(cluster.grpc_address, cluster.admin_address) as client,
    ):
        yield client


async def run_all(client: Client, number: int = CONCURRENCY, **sampling: float) -> list[Answer]:
    options = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0, **sampling}
    return await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts()[:number]))


async def test_pair_equals_transformers(pair: Client, worker_set: tuple[str, ...]) -> None:
    await check_twice(pair, one_cache="dp=2" not in worker_set)


@pytest.mark.long
async def test_unified_equals_transformers(unified: Client, worker_set: tuple[str, ...]) -> None:
    await check_twice(unified, one_cache="dp=2" not in worker_set)


async def check_twice(client: Client, one_cache: bool) -> None:
    """The second time from the prefix cache: every long prompt, or some where each replica has a cache of its own."""
    for answers in (await run_all(client), await run_all(client)):
        assert all(len(answer.tokens) == NEW_TOKENS for answer in answers)
        assert_greedy([Continuation(answer.tokens, answer.sampled) for answer in answers], prompts())
    assert [answer.usage.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts()]
    cached = [
        answer.usage.cached_prompt_tokens >= (len(prompt) - 1) // 64 * 64
        for prompt, answer in zip(prompts(), answers, strict=True)
        if len(prompt) > 64
    ]
    assert all(cached) if one_cache else any(cached)
    await client.wait_whole()


async def test_seeded_sampling_is_the_same_through_the_pair_and_unified(pair: Client, unified: Client) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    through_pair = await run_all(pair, 8, **sampling)
    alone = await run_all(unified, 8, **sampling)
    assert [a.tokens for a in through_pair] == [a.tokens for a in alone]
    other_seed = await run_all(pair, 3, **{**sampling, "seed": 1235})
    assert all(a.tokens != b.tokens for a, b in zip(other_seed, through_pair, strict=False))


@pytest.mark.gpu
@pytest.mark.timeout(1500)
async def test_fp8_says_the_same_through_the_pair_and_unified(tmp_path: Path) -> None:
    export(TINY, tmp_path / "fp8")
    pair = await answers_in_fp8(tmp_path / "fp8", prefill=1, decode=1)
    unified = await answers_in_fp8(tmp_path / "fp8", prefill=0, decode=0, unified=1)
    both = list(zip(pair, unified, strict=True))
    different = [(one.tokens, other.tokens) for one, other in both if one.tokens != other.tokens]
    assert len(different) <= MOST_DIFFERENT, different
    same = [(one.sampled, other.sampled) for one, other in both if one.tokens == other.tokens]
    shifts = [abs(a - b) for one, other in same for a, b in zip(one, other, strict=True)]
    assert sum(shifts) / len(shifts) <= LARGEST_SHIFT, (sum(shifts) / len(shifts), max(shifts))


async def answers_in_fp8(model: Path, **workers: int) -> list[Answer]:
    """Greedy, in BF16 with FP8 weights."""
    device = ("device=cuda", f"memory_fraction={PART}")
    worker_set = (*device, "dtype=bfloat16", "limits.checks=[canary, poison]")
    spec, asked = ClusterSpec(**workers, model=model, worker_set=worker_set), await questions()
    async with LocalCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:
        told = {"max_tokens": NEW_TOKENS, "logprobs": 0, "timeout": 240}
        answers = await asyncio.gather(*(client.generate(question, **told) for question in asked))
        await client.wait_whole()
    return answers


async def questions() -> list[list[int]]:
    tokenizer = Tokenizer.load(TINY)
    items = [item for task, count in FP8_QUESTIONS.items() for item in TASKS[task].items(0, count)]
    texts = [tokenizer.render([message._asdict() for message in item.messages]) for item in items]
    return [await tokenizer.encode(text, add_bos=False) for text in texts]
