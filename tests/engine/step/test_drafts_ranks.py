"""Drafts on several ranks: all replicas take the same number of drafts in a step, whatever work each of them has. Their
answers, and those of tensor-parallel ranks, are test_parity_ranks.py's.
"""

from engine import drafting
from engine.drafting import Arrivals, serve
from engine.harness import SETTINGS, TINY, FakeReplicas, request
from engine.joined import ranks_together
from engine.schedule.test_context_parallel import recorded
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.sim.factory import build_sim_engine


def sim_engine(drafts: int, lockstep: Lockstep | None = None) -> Engine:
    limits = {**TINY, "max_running": 5, "num_pages": 60, "max_prefill_tokens": 6}
    config = EngineConfig.model_validate({**limits, "draft_tokens": drafts, "draft_batches": (4, 2, 1)})
    return build_sim_engine(config, Role.UNIFIED, SETTINGS, lockstep)


def sim_requests(rooms: range, num_prompt: int, num_outputs: int) -> list[Request]:
    return [request(room, list(range(20 + room, 20 + room + num_prompt)), max_tokens=num_outputs) for room in rooms]


SIM: list[Arrivals] = [
    {0: sim_requests(range(3), 3, 12), **{step: sim_requests(range(step, step + 1), 3, 25) for step in (20, 40, 60)}},
    {21: sim_requests(range(101, 103), 2, 12), 41: sim_requests(range(103, 108), 1, 12),
     62: sim_requests(range(108, 109), 18, 5)},
]  # fmt: skip


def test_replicas_take_the_number_of_drafts_of_the_largest() -> None:
    replicas, batches, said = FakeReplicas(2), [[], []], [{}, {}]

    def replica(rank: int) -> None:
        one = sim_engine(3, Lockstep(replicas.of(rank)))
        batches[rank] = recorded(one)
        said[rank] = drafting.tokens(serve(one, SIM[rank], 90))

    ranks_together(replica, 2)
    alone = [drafting.tokens(serve(sim_engine(0), arrivals, 100)) for arrivals in SIM]
    assert said == alone and all(alone)
    seen = set()
    for pair in zip(*batches, strict=True):
        sampled = tuple(batch.num_sampled for batch in pair)
        for batch in pair:
            assert batch.num_queries == sim_engine(3).config.num_queries(max(sampled))
            assert batch.dp_num_tokens == tuple(one.num_tokens for one in pair)
            assert batch.dp_num_sampled == sampled
            assert batch.all_decode is all(one.is_decode for one in pair)
        few, many = sorted(sampled)
        seen.add((few, many, pair[0].num_queries, pair[0].all_decode))
    assert {(0, 1, 4, True), (0, 3, 2, True)} <= seen, "the other one is idle"
    assert {(1, 5, 1, True), (1, 2, 3, True)} <= seen, "the other one decides"
    assert any(b.chunk_lens and a.num_decode and a.num_queries > 1 for a, b in zip(*batches, strict=True))
