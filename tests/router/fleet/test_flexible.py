"""Flexible workers: any phase over one Link, by duty, and never both sub-requests of an attempt on one of them."""

from collections.abc import Callable

import pytest
from millrace.v1 import worker_pb2
from router.fake_worker import DECODE, FLEXIBLE, PREFILL, FakeWorker, dies, expected, hangs
from router.harness import Cluster

PROMPT = list(range(65, 85))
ON_PREFILL, ON_DECODE, ON_BOTH = worker_pb2.DUTY_PREFILL, worker_pb2.DUTY_DECODE, worker_pb2.DUTY_BOTH


async def fleet(cluster: Callable, *duties: int, routing: dict | None = None, **settings: object) -> Cluster:
    workers = [FakeWorker(FLEXIBLE) for _ in duties]
    for worker, duty in zip(workers, duties, strict=True):
        worker.duty = duty
    made = await cluster(*workers, routing={"duties": "advise", **(routing or {})}, **settings)
    await made.until(lambda: len(made.router.registry.warmups.ready) == len(workers) ** 2)
    return made


@pytest.mark.parametrize("duty", [0, ON_BOTH, ON_PREFILL, ON_DECODE])
async def test_one_alone_serves_whatever_its_duty(cluster: Callable, duty: int) -> None:
    made = await fleet(cluster, duty)
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert made.workers[0].sources == [None] and not made.workers[0].exports


async def test_duties_are_roles_to_requests(cluster: Callable) -> None:
    made = await fleet(cluster, ON_PREFILL, ON_DECODE)
    first, second = made.workers
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert len(first.exports) == 1 and second.sources[0].epoch == first.epoch
    await made.settled()
    first.change(duty=ON_DECODE)
    second.change(duty=ON_PREFILL)
    known, duties = made.router.registry.workers, {first.epoch: ON_DECODE, second.epoch: ON_PREFILL}
    await made.until(lambda: {one.epoch: one.duty for one in known.values()} == duties)
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert len(second.exports) == 1 and first.sources[1].epoch == second.epoch
    await made.quiet()


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
async def test_who_is_left_of_a_pair_goes_on_alone(cluster: Callable, dead: int, after: int) -> None:
    """The attempt that is over has a sub-request on the same Link as the next one."""
    made = await fleet(cluster, ON_PREFILL, ON_DECODE, timeouts={"handover": 0.5})  # ends it where prefill died late
    made.workers[dead].script.append(dies(after))
    if not dead:
        made.workers[1].script.append(hangs())
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    await made.quiet()


async def test_every_pair_but_with_itself_is_warmed(cluster: Callable) -> None:
    made = await fleet(cluster, 0, 0, 0)
    epochs = [worker.epoch for worker in made.workers]
    for worker in made.workers:
        assert sorted(worker.warmups) == sorted(["", *(epoch for epoch in epochs if epoch != worker.epoch)])


async def test_beside_fixed_roles(cluster: Callable) -> None:
    flexible = FakeWorker(FLEXIBLE)
    flexible.duty = ON_DECODE
    prefill = FakeWorker(PREFILL)
    made = await cluster(prefill, flexible, routing={"duties": "advise"})
    await made.until(lambda: len(made.router.registry.warmups.ready) == 2)
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert flexible.sources[0].epoch == prefill.epoch


async def test_each_limit_of_the_tenant_goes_to_who_can_keep_it(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), routing={"slo": {"ttft": 30.0, "tpot": 0.04}})
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    prefill, decode = made.prefills[0].submitted[0], made.decodes[0].submitted[0]
    assert (prefill.tpot_limit_ms, decode.tpot_limit_ms, decode.ttft_limit_ms) == (0, 40, 0)
    assert 0 < prefill.ttft_limit_ms <= 30_000, "what is left of it"
    late = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), routing={"slo": {"ttft": 1e-9}})
    assert (await late.generate(PROMPT)).tokens() == expected(PROMPT, 8)
    assert not late.prefills[0].submitted[0].ttft_limit_ms, "the router's queue has let others go first"
