"""The host tier of a replica of two ranks: one store, one decision, and a copy counts when both have carried it out."""

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.harness import SETTINGS, eager, request
from engine.joined import join_all, together
from engine.offload.test_host_tier import PROMPT, Tiered, evicted, small
from hypothesis import given
from hypothesis import strategies as st
from millrace_bench.stepping_ranks import exchanges
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import GIB, Limits, Role
from millrace_serve.engine.core import Abort, FlushCache, RequestId, Submit
from millrace_serve.engine.lockstep import packing
from millrace_serve.engine.lockstep.links import FRAME, RankLost
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.offload.page_copier import PageCopier, PageMoves, SharedStore, share
from millrace_serve.engine.sim.runner import SimHandle, SimRunner
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.batch import HostBatch, StepBatch
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import paths
from millrace_testing.examples import examples
from model.ranks import run_jobs

LIMITS = {"page_size": 16, "max_model_len": 256, "max_running": 4, "max_prefill_tokens": 64, "checks": ("canary",)}
PROMPTS = [[10 + (7 * i + 31 * room) % 500 for i in range(140)] for room in range(6)]
OUTPUTS, PAGE_BYTES = 50, 147520
MOST_BEHIND = 4  # messages, of a follower in these tests


def stores(tp: int, dp: int, num_slots: int, page_bytes: int) -> list[SharedStore]:
    """Of every rank."""
    each = enumerate(exchanges(tp * dp))
    return together([lambda r=r, to=to: share(r, tp, to, num_slots, page_bytes) for r, to in each])


class SlowCopier(PageCopier):
    """A follower's, whose copies take time, as a GPU's do: each way in order, until the test lets them end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.under_way: dict[bool, deque[PageMoves]] = {True: deque(), False: deque()}

    def follow(self, *started: PageMoves) -> None:
        for moves in started:
            self.under_way[moves.to_host].append(moves)

    def carry_out(self, leave: int) -> None:
        for moves in self.under_way.values():
            while len(moves) > leave:
                super().follow(moves.popleft())


class Replica(Tiered):
    """Two ranks. The follower is `behind` by so many messages, and by so many copies of each way."""

    def __init__(self, role: Role = Role.UNIFIED, host_pages: int = 100, **config: Any) -> None:
        super().__init__(role, host_pages, **config)
        engine, self.behind = self.engine, 0
        pool = KvPool(engine.pool.layout, self.config.num_pages)
        self.shared = stores(2, 1, host_pages, pool.layout.page_bytes)
        engine.host.copier = PageCopier(engine.pool, host_pages, self.shared[0])
        poll = engine.host.copier.poll
        engine.host.copier.poll = lambda: [] if self.held else poll()  # type: ignore[method-assign]
        engine._lockstep = Lockstep(followers=[self])  # type: ignore[arg-type]
        self.copier = SlowCopier(pool, host_pages, self.shared[1])
        self._runner = SimRunner(SETTINGS, pool, self.config)
        self._sent: deque[tuple[bytes, np.ndarray, np.ndarray]] = deque()
        self._leave = 0

    def send(self, message: bytes) -> None:
        """The leader's connection. The oracle, which stands for the model, goes along."""
        oracle: Any = self.engine._runner
        self._sent.append((message[FRAME.size :], oracle._prompt_hash.copy(), oracle._eos_from.copy()))
        self._follow(MOST_BEHIND)

    def receive_message(self) -> bytes:
        """The follower's connection."""
        if len(self._sent) <= self._leave:
            return b""
        data, self._runner._prompt_hash, self._runner._eos_from = self._sent.popleft()
        return data

    def launch(self, batch: HostBatch) -> SimHandle:
        """The follower's runner: its pages are those of the sequences, too."""
        handle = self._runner.launch(batch)
        assert not handle.result().corrupt
        return handle

    def _follow(self, leave: int) -> None:
        self._leave = leave
        Lockstep(leader=self).follow(self, lambda copies: self.copier.follow(*copies.moves))  # type: ignore[arg-type]

    def step(self, *inputs: Any) -> Any:
        events = super().step(*inputs)
        self._follow(min(self.behind, MOST_BEHIND))
        self.copier.carry_out(self.behind)
        return events

    def run(self, *inputs: Any) -> int:
        self.behind = 0
        return super().run(*inputs)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
def test_evicted_prefix_comes_back_to_both_ranks(overlap: bool) -> None:
    driver = evicted(Replica, overlap=overlap)
    driver.ask(2, PROMPT)
    driver.run()
    load = driver.engine.load()
    assert driver.cached(2) == load.counters["host_cached_tokens"] == 12
    assert driver.shared[0].ended.tolist() == [[0, 0], [1, driver.engine.host.copier._started[True]]]
    driver.end()


def test_copy_counts_when_the_last_rank_has_carried_it_out() -> None:
    """Until then no step reads what is loaded, and no slot gets other bytes."""
    driver = evicted(Replica)
    driver.behind = 100
    driver.ask(2, PROMPT)
    driver.ask(3, [77] * 3)
    for _ in range(20):
        driver.step()
    assert RequestId(3, 0) in driver.finish and RequestId(2, 0) not in driver.firsts
    assert [copy.num_pins for copy in driver.cache.host.tier.find(page_hashes(PROMPT, 4)[:3])] == [1] * 3
    driver.run()
    assert driver.cached(2) == 12
    driver.end()


def test_step_that_the_leader_has_ends_here_before_a_copy() -> None:
    """The leader may have its results first: here the step may still write to a page that is copied."""
    log: list[str] = []
    moves = [PageMoves(False, [1], [2])]
    sent = [StepBatch.idle(), *(packing.Copies(moves, settled) for settled in (False, True)), StepBatch.idle()]
    leader: Any = SimpleNamespace(receive_message=lambda: packing.encode(sent.pop(0)) if sent else b"")
    step = SimpleNamespace(done=lambda: True, result=lambda: log.append("end"))
    runner: Any = SimpleNamespace(launch=lambda batch: (log.append("step"), step)[1])
    Lockstep(leader=leader).follow(runner, lambda copies: log.append("copy"))
    assert log == ["step", "copy", "end", "copy", "step", "end"]


def test_replicas_have_a_store_each_without_a_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    each = stores(2, 2, 3, 5)
    for rank, store in enumerate(each):
        store.slots[rank % 2] = rank + 1
    assert [store.slots[:2, 0].tolist() for store in each] == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert [store.part(5) for store in each[:2]] == [slice(0, 2), slice(2, 5)]
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "host-tier" in path.name]


def test_follower_that_ends_during_a_load_ends_the_replica() -> None:
    """Nothing is computed from pages that it may not have."""
    driver = evicted(Replica)
    leader, follower = join_all(2, "aa")
    driver.engine._lockstep = leader
    driver.ask(2, PROMPT)
    driver.step()
    assert isinstance(packing.decode(follower._receive()), packing.Copies)
    follower._close()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        for room in range(3, 100):
            driver.ask(room, [room] * 9)
            driver.step()
    assert RequestId(2, 0) not in driver.firsts


class Served(msgspec.Struct):
    tokens: dict[int, list[int]]  # by room
    counters: dict[str, float]


def serve(dims: ParallelDims, sizes: dict[str, Any], folder: str, kind: str = "cpu") -> str:
    """A Served in JSON: each replica its part of the prompts, twice. `folder`: of the disk tier, if there are tiers."""
    limits = Limits.model_validate({**LIMITS, **sizes, "disk_cache": folder if "host_cache_gib" in sizes else None})
    device = torch.device(f"cuda:{dims.rank}" if kind == "cuda" else kind)
    rank = load_rank(limits, Role.UNIFIED, paths.TINY, dims, device, torch.float32)
    if dims.tp_rank:
        rank.follow()
        return ""
    eager(rank.lockstep)
    engine = rank.engine()
    engine.open_store()
    said: dict[int, list[int]] = {}
    todo = [[start + room for room in range(dims.dp_rank, len(PROMPTS), dims.dp)] for start in (0, 100)]
    done = [Path(f"{folder}-{rank.copier.num_slots}-{replica}") for replica in range(dims.dp)]
    while not engine.stopped:
        if not engine.has_work() and not engine.host.copier.busy and not engine.host.disk.pinned:
            for room in todo.pop(0) if todo else ():
                said[room] = []
                engine.submit(Submit(request(room, PROMPTS[room % 100], max_tokens=OUTPUTS)))
            if not engine.has_work():
                done[dims.dp_rank].touch()
                if all(each.exists() for each in done):
                    engine.stop()
        for output in engine.step().outputs:
            assert output.error is None, output.error
            said[output.id.room] += [token.token_id for token in output.tokens]
    engine.check_idle()
    counters = engine.load().counters
    engine.close()
    return msgspec.json.encode(Served(said, counters)).decode()


def tight(host_pages: int) -> dict[str, Any]:
    """A pool for two of the sequences that grow, and a host tier."""
    return {"num_pages": 20, "host_cache_gib": host_pages * PAGE_BYTES / GIB}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_answers_of_two_gpus_with_tiers_are_those_without(tmp_path: Path) -> None:
    sizes = ({"num_pages": 200}, tight(500), tight(30))
    jobs: list[Any] = [(2, 1, serve, (size, str(tmp_path / "kv"), "cuda")) for size in sizes]
    without, *others = (msgspec.json.decode(one[0], type=Served) for one in run_jobs(jobs, tmp_path, cuda=True))
    assert all(one.tokens == without.tokens and one.counters["resumed"] for one in others)
    assert others[1].counters["disk_pages/load"]


@pytest.mark.long
def test_answers_with_tiers_are_those_of_one_rank_without(tmp_path: Path) -> None:
    """Sequences are evicted and preempted, saved and resumed. The ranks of the second case find the pages of the first
    on disk, and have little memory above it.
    """
    torch.set_num_threads(1)
    alone = msgspec.json.decode(serve(ParallelDims(), {"num_pages": 200}, str(tmp_path / "none")), type=Served)
    cases = ((2, 1, 500), (2, 2, 30))  # tp, dp, pages of the host tier
    jobs: list[Any] = [(tp, dp, serve, (tight(pages), str(tmp_path / "kv"))) for tp, dp, pages in cases]
    for (tp, dp, _), ranks in zip(cases, run_jobs(jobs, tmp_path), strict=True):
        leaders = [msgspec.json.decode(one, type=Served) for one in ranks[::tp]]
        assert {room: said for one in leaders for room, said in one.tokens.items()} == alone.tokens
        for one in leaders:
            assert one.counters["preemptions"] and one.counters["resumed"] and one.counters["host_cached_tokens"]
            assert one.counters["disk_pages/store"] and (one.counters["disk_pages/load"] > 0) is (dp > 1)


@examples(20)
@given(data=st.data())
def test_any_order_of_events_and_any_delay_of_a_rank(data: st.DataObject) -> None:
    """Both ranks check the canaries of their pages in each step, and the leader's tokens are the oracle's."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    driver = small(Replica, rng.choice([Role.UNIFIED, Role.DECODE]), rng)
    for room in range(1, 25):
        prompt = [rng.randrange(16, 18)] * 4 * rng.randrange(1, 5) + [rng.randrange(16, 18)] * rng.randrange(1, 5)
        driver.ask(room, prompt, max_tokens=rng.randrange(1, 12), priority=rng.randrange(2))
        for _ in range(rng.randrange(6)):
            driver.behind = rng.randrange(5)
            driver.step()
        if rng.random() < 0.2:
            driver.tell(rng.choice([Abort(RequestId(rng.randrange(1, room + 1), 0)), FlushCache()]))
    driver.end()
