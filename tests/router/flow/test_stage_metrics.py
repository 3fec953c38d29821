"""The histogram of stages and the counts of tokens: whom they count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from router.fake_worker import DECODE, PREFILL, FakeWorker, hangs
from router.harness import Cluster

PROMPT = [10, 20, 30]
STAGES = ("route", "queue", "prefill", "first_token", "kv_transfer", "decode", "total")


def stages(made: Cluster) -> dict[str, float]:
    return {stage: made.metric("millrace_stage_seconds_count", stage=stage) for stage in STAGES}


def spent(made: Cluster, stage: str) -> float:
    return made.metric("millrace_stage_seconds_sum", stage=stage)


async def test_stages_that_a_request_reached_count_it_once(pair: Cluster) -> None:
    assert (await pair.generate(PROMPT)).error is None
    await pair.quiet()
    assert set(stages(pair).values()) == {1}


async def test_a_request_that_ends_in_the_queue_counts_there_with_its_wait(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, credits=0), FakeWorker(DECODE))
    result = await made.generate(PROMPT, timeout=0.2)
    assert result.error is not None
    await made.quiet()
    reached = {"route", "queue", "first_token", "total"}
    assert stages(made) == {stage: float(stage in reached) for stage in STAGES}
    assert spent(made, "queue") > 0.1 and spent(made, "first_token") > 0.1


async def test_a_request_that_ends_in_its_prefill_counts_there(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    for worker in made.workers:
        worker.script.append(hangs())
    result = await made.generate(PROMPT, timeout=0.2)
    assert result.error is not None
    await made.quiet()
    reached = {"route", "queue", "prefill", "first_token", "total"}
    assert stages(made) == {stage: float(stage in reached) for stage in STAGES}
    assert spent(made, "prefill") > 0.1


@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_counts_for_each_choice_as_in_rates(n: int, pair: Cluster) -> None:
    assert (await pair.generate(PROMPT, n=n)).error is None
    await pair.quiet()
    for name, labels in (("millrace_tokens_total", {}), ("millrace_tenant_tokens_total", {"tenant": "default"})):
        assert pair.metric(name, direction="prompt", **labels) == n * len(PROMPT), name
