"""A broken stream goes on at other workers as if nothing had happened; and what happens when there is no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from millrace.v1 import common_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, FakeWorker, dies, expected, fails
from router.harness import Cluster

PROMPT = [10, 20, 30]
GRAMMAR = common_pb2.Grammar(regex="[a-z]+")


async def spare(cluster: Callable, **settings: object) -> Cluster:
    made = await cluster(*(FakeWorker(role) for role in (PREFILL, PREFILL, DECODE, DECODE)), **settings)
    for workers in (made.prefills, made.decodes):
        workers[1].script = workers[0].script
    return made


@pytest.mark.parametrize("after", [0, 1, 2, 7, 19])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.0, "seed": 77}, {"logprobs": 2, "seed": 5}, {"grammar": GRAMMAR}],
    ids=["greedy", "seeded", "logprobs", "grammar"],
)
async def test_the_continuation_is_identical(cluster: Callable, sampling: dict, after: int) -> None:
    """Same seed, positions that go on, the grammar with what it has already matched, log-probabilities for every
    token once.
    """
    made = await spare(cluster)
    made.decodes[0].script.append(dies(after))
    result = await made.generate(PROMPT, sampling={"max_tokens": 20, **sampling})
    assert result.error is None
    assert result.tokens() == expected(PROMPT, 20, sampling.get("seed", 0))
    if "logprobs" in sampling:
        entries = [entry for response in result.responses for entry in response.logprobs]
        assert [entry.sampled.token_id for entry in entries] == result.tokens()
    first, *others = sorted(
        (request for worker in made.decodes for request in worker.submitted), key=lambda request: request.id.attempt
    )
    for again in others:
        assert again.sampling == first.sampling and again.id.room == first.id.room
        assert list(again.token_ids) == PROMPT + result.tokens()[: again.num_prior_outputs]
    await made.quiet()


async def test_without_budget_the_original_error_is_told_and_may_be_retried(cluster: Callable) -> None:
    made = await spare(cluster, resilience={"retries": {"ratio": 0.0, "per_s": 0.1}})
    made.decodes[0].script.extend([fails("KV_EXPIRED", after=2), fails("KV_EXPIRED", after=2)])
    result = await made.generate(PROMPT)
    error = from_rpc_error(result.error)
    assert error.reason is Reason.KV_EXPIRED and error.retry_after_s > 0
    assert "too many requests are tried again" in error.message
    assert result.tokens() == expected(PROMPT, len(result.tokens())), "what it had was right"
    assert made.metric("millrace_retries_total", reason="KV_EXPIRED") == 1
    assert made.metric("millrace_retries_refused_total") == 1
    await made.quiet()


async def test_a_worker_that_fails_again_and_again_is_left_out_and_explained(cluster: Callable) -> None:
    made = await spare(cluster, resilience={"outliers": {"consecutive": 3, "pause": 60}})
    bad, good = made.decodes
    bad.script, good.script = type(bad.script)([fails("STALLED")] * 50), type(bad.script)()
    for i in range(12):
        result = await made.generate(PROMPT, request_id=f"r{i}")
        assert result.tokens() == expected(PROMPT, 8)
    assert len(bad.submitted) == 3, "three failures in a row, and no request more"
    assert made.metric("millrace_ejections_total", role="decode", why="consecutive") == 1
    decision = made.router.registry.placer.decisions_of("r11")[-1]
    excluded = [row.excluded for step in decision.explain() for row in step.candidates if row.excluded]
    assert excluded == ["ejected: failures in a row"]
    await made.quiet()


async def test_a_restarted_worker_is_used_at_once(cluster: Callable) -> None:
    made = await spare(cluster, resilience={"outliers": {"consecutive": 1, "pause": 60}})
    bad, good = made.decodes
    bad.script, good.script = type(bad.script)([fails("STALLED")]), type(bad.script)()
    while not bad.submitted:
        await made.generate(PROMPT)
    await bad.restart()
    await made.until(lambda: all(status.routable for status in made.router.registry.status()))
    while len(bad.submitted) < 2:
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    await made.quiet()
