"""Two sets of pools side by side: which one is asked, what pairs, and that no answer is of two models."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from millrace_common.reasons import Reason
from millrace_router.config import Policy, Routing
from millrace_router.discovery.base import Target
from millrace_router.policy.choose import Chooser, Situation
from millrace_router.policy.snapshot import Placement, View
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, fails, hangs
from router.fleet.test_workers import detail
from router.harness import Cluster
from router.policy.test_choose import WANT, choose, replica

OLD, NEW = "", "b"


class Sets:
    """A router's workers, by address with their revisions, as discovery would list them."""

    def __init__(self) -> None:
        self.made: Cluster
        self._revisions: dict[FakeWorker, str] = {}
        self._started: list[FakeWorker] = []  # those that are no longer listed included

    async def add(self, revision: str, *workers: FakeWorker) -> None:
        for worker in workers:
            await worker.start()
            self._started.append(worker)
            self._revisions[worker] = revision
        self._list()

    def remove(self, *workers: FakeWorker) -> None:
        """Discovery no longer lists them; what runs there goes on."""
        for worker in workers:
            del self._revisions[worker]
        self._list()

    async def routable(self, *workers: FakeWorker) -> None:
        made, addresses = self.made, {worker.address for worker in workers}
        await made.until(lambda: {s.address for s in made.router.registry.status() if s.routable} == addresses)

    def _list(self) -> None:
        targets = [Target(w.address, w.address, revision=revision) for w, revision in self._revisions.items()]
        self.made.router.registry.on_targets(targets)

    async def stop(self) -> None:
        for worker in self._started:
            await worker.stop()


@pytest.fixture
async def sets(cluster: Callable) -> AsyncIterator[Callable]:
    """`await sets(routing={…})`: a router without workers."""
    found = Sets()

    async def make(**settings: object) -> Sets:
        found.made = await cluster(**settings)
        return found

    yield make
    await found.stop()


def pair(weights: str = "weights-a", layout: str = "layout-a") -> tuple[FakeWorker, FakeWorker]:
    workers = FakeWorker(PREFILL, layout=layout), FakeWorker(DECODE, layout=layout)
    for worker in workers:
        worker.weights = weights
    return workers


# ----------------------------------------------------------------------------------------- the policy


def two_sets(capacity: int = 4) -> View:
    prefills = replica("p1"), replica("p2", revision=NEW, tokens=500, capacity=capacity)
    sources = frozenset({"e-p1"}), frozenset({"e-p2"})
    decodes = replica("d1", sources=sources[0]), replica("d2", sources=sources[1], revision=NEW, tokens=500)
    return View(prefills, decodes, first=NEW)


def test_the_first_revision_is_asked_whatever_its_load() -> None:
    view = two_sets()
    found = Chooser(Policy.LEAST_LOADED, Policy.LEAST_LOADED, Routing()).choose(Situation(view, WANT))
    assert found is not None and found.placement == Placement(view.prefill[1], view.decode[1])
    (prefill, _) = found.explain()
    assert [row.excluded for row in prefill.candidates] == ["revision 'b' is asked first", ""]


def test_the_others_get_what_it_has_no_room_for() -> None:
    view = two_sets(capacity=0)
    assert choose(view) == Placement(view.prefill[0], view.decode[0])


# ----------------------------------------------------------------------------------------- the router


async def test_sets_of_two_revisions_never_pair(sets: Callable) -> None:
    both = await sets()
    old, (prefill, decode) = pair(), pair()
    await both.add(OLD, *old)
    await both.add(NEW, prefill)
    await both.routable(*old)
    assert "equal KV layout and revision" in detail(both.made, prefill) and old[1].warmups == [old[0].epoch]
    await both.add(NEW, decode)
    await both.routable(*old, prefill, decode)
    assert decode.warmups == [prefill.epoch]
    shown = {status.address: dict(status.topology) for status in both.made.router.registry.status()}
    assert shown[decode.address] == {"revision": NEW} and shown[old[0].address] == {}


async def test_traffic_moves_to_a_revision_with_its_first_whole_pair(sets: Callable) -> None:
    both = await sets(routing={"revision": NEW})
    old, (prefill, decode) = pair(), pair(layout="layout-b")
    await both.add(OLD, *old)
    await both.add(NEW, prefill)
    await both.routable(*old)
    assert (await both.made.generate([1])).tokens() == expected([1], 8)
    assert old[0].submitted and not prefill.submitted
    await both.add(NEW, decode)
    await both.routable(*old, prefill, decode)
    before = len(old[0].submitted)
    for i in range(4):
        assert (await both.made.generate([i])).error is None
    assert len(prefill.submitted) == len(decode.submitted) == 4 and len(old[0].submitted) == before
    both.remove(decode)
    assert (await both.made.generate([1])).error is None, "the old one until then, and again"
    assert len(old[0].submitted) == before + 1


async def test_without_a_setting_the_workers_without_a_revision_come_first(sets: Callable) -> None:
    """So every router says the same, one that starts in the middle as well."""
    both = await sets()
    new, old = pair("weights-b", "layout-b"), pair()
    await both.add(NEW, *new)
    await both.routable(*new)
    await both.add(OLD, *old)
    await both.routable(*old)
    assert "with other weights" in detail(both.made, new[0])


async def test_a_retry_goes_on_in_a_set_with_another_layout(sets: Callable) -> None:
    """Equal weights: the new pair computes the prompt and what was said so far, and goes on."""
    both = await sets()
    old, new = pair(), pair(layout="layout-b")
    await both.add(OLD, *old)
    await both.add(NEW, *new)
    await both.routable(*old, *new)
    old[1].script.append(fails("DRAINING", after=3))
    result = await both.made.generate([1])
    assert result.tokens() == expected([1], 8) and result.error is None
    assert [request.num_prior_outputs for request in new[1].submitted] == [3]


def spoken_tokens(sets: Sets) -> int:
    (stream,) = sets.made.router.inference.active
    return len(stream.continuations[0].generation.flow.outputs)


@pytest.mark.parametrize("name", ["tiny", "other"])
async def test_no_answer_is_of_two_models(sets: Callable, name: str) -> None:
    """Of one name or two. Who has said nothing yet begins with the new model; who has, ends."""
    both = await sets(aliases=["tiny", "other"])
    old, new = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    new.model, new.weights = name, "weights-b"
    await both.add(OLD, old)
    await both.add(NEW, new)
    await both.routable(old)
    why = "with other weights" if name == "tiny" else "'tiny' is served"
    await both.made.until(lambda: why in detail(both.made, new))
    assert (await both.made.generate([1], model="tiny")).error is None and not new.submitted
    old.script += [hangs(after=3), hangs()]
    spoken = asyncio.create_task(both.made.generate([1]))
    await both.made.until(lambda: both.made.router.inference.active and spoken_tokens(both) == 3)
    silent = asyncio.create_task(both.made.generate([2]))
    await both.made.until(lambda: len(old.active) == 2)
    both.remove(old)
    await both.routable(new)
    await old.stop()
    result = await spoken
    assert from_rpc_error(result.error).reason is Reason.NO_WORKERS
    assert result.error.code() is grpc.StatusCode.UNAVAILABLE and "began this answer" in result.error.details()
    assert result.tokens() == expected([1], 3)
    assert (await silent).tokens() == expected([2], 8)
    assert [list(request.token_ids) for request in new.submitted] == [[2]]


async def test_an_answer_that_has_begun_ends_with_its_own_model(sets: Callable) -> None:
    both = await sets(routing={"revision": NEW})
    old, other, new = FakeWorker(UNIFIED), FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    new.weights = "weights-b"
    await both.add(OLD, old, other)
    await both.routable(old, other)
    for worker in (old, other):
        worker.script.append(hangs(after=3))
    running = asyncio.create_task(both.made.generate([1]))
    await both.made.until(lambda: any(worker.active for worker in (old, other)))
    first, second = (old, other) if old.active else (other, old)
    second.script.clear()
    await both.add(NEW, new)
    await both.routable(new)
    await first.stop()
    result = await running
    assert result.tokens() == expected([1], 8) and result.error is None
    assert not new.submitted and second.submitted[0].num_prior_outputs == 3
    assert (await both.made.generate([2])).error is None and len(new.submitted) == 1


async def test_names_of_the_model(sets: Callable) -> None:
    """Its own, those of workers with equal weights, and the aliases."""
    both = await sets(aliases=["chat"])
    first, renamed = FakeWorker(UNIFIED), FakeWorker(UNIFIED)
    renamed.model = "renamed"
    await both.add(OLD, first, renamed)
    await both.routable(first, renamed)
    for name in ("tiny", "renamed", "chat", ""):
        assert (await both.made.generate([1], model=name)).error is None
    refused = (await both.made.generate([1], model="none")).error
    assert refused.code() is grpc.StatusCode.NOT_FOUND and "use 'tiny' or 'renamed' or 'chat'" in refused.details()
    models = (await both.made.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["tiny", "renamed", "chat"]
    answer = await both.made.http.post("/v1/completions", json={"model": "chat", "prompt": [1], "max_tokens": 1})
    assert answer.status_code == 200
    both.remove(first)
    await both.routable(renamed)
    assert (await both.made.generate([1], model="tiny")).error is not None
