"""Drafts on several ranks: all replicas take the same number of drafts in a step, whatever work each of them has, and
the ranks of a tensor-parallel group accept the same tokens.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from engine import drafting
from engine.drafting import CPU, GREEDY, SEEDED, Arrivals, Tokens, questions, serve
from engine.harness import SETTINGS, TINY, FakeReplicas, eager, request
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.sim.factory import build_sim_engine
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import paths
from model.ranks import run_jobs


def recorded(one: Engine) -> list[HostBatch]:
    """Every batch from now on."""
    launch, batches = one._runner.launch, []
    one._runner.launch = lambda batch: (batches.append(batch), launch(batch))[1]
    return batches


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

    threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    alone = [drafting.tokens(serve(sim_engine(0), arrivals, 100)) for arrivals in SIM]
    assert said == alone and all(alone)
    seen = set()
    for pair in zip(*batches, strict=True):
        sampled = tuple(batch.num_sampled for batch in pair)
        for batch in pair:
            assert batch.num_queries == 1 + sim_engine(3).config.num_drafts(max(sampled))
            assert batch.dp_num_tokens == tuple(one.num_tokens for one in pair)
            assert batch.dp_num_sampled == sampled
            assert batch.all_decode is all(one.is_decode for one in pair)
        few, many = sorted(sampled)
        seen.add((few, many, pair[0].num_queries, pair[0].all_decode))
    assert {(0, 1, 4, True), (0, 3, 2, True)} <= seen, "the other one is idle"
    assert {(1, 5, 1, True), (1, 2, 3, True)} <= seen, "the other one decides"
    assert any(b.chunk_lens and a.num_decode and a.num_queries > 1 for a, b in zip(*batches, strict=True))


REAL: list[Arrivals] = [
    {0: [request(0, questions()[1], max_tokens=30, **GREEDY), request(1, questions()[2], max_tokens=12, **SEEDED)]},
    {6: [request(2, (questions()[0] * 2)[:130], max_tokens=30, **GREEDY)],
     12: [request(3, questions()[2], max_tokens=20, **SEEDED)]},
]  # fmt: skip
LIMITS = {"num_pages": 30, "max_model_len": 256, "max_running": 4, "max_prefill_tokens": 60, "checks": ("canary",)}
CASES = ((1, 2, "off"), (1, 2, "on"), (2, 1, "off"), (2, 1, "on"), (2, 2, "on"))  # tp, dp, graphs


def serve_rank(dims: ParallelDims, graphs: str) -> tuple[Tokens, list[int], list[int], int]:
    """The tokens of a leader; lengths and last tokens of the slots; how many drafts were accepted."""
    limits = Limits.model_validate({**LIMITS, "draft_tokens": 3, "draft_batches": (4, 2, 1)})
    options = Execution.model_validate({"graphs": graphs})
    rank = load_rank(limits, Role.UNIFIED, paths.TINY, dims, CPU, torch.float32, execution=options)
    said, accepted, slots = {}, 0, rank.runner.slots
    if dims.tp_rank:
        rank.follow()
    else:
        eager(rank.lockstep)
        one = rank.engine()
        arrivals = REAL[dims.dp_rank] if dims.dp > 1 else {0: REAL[0][0], 4: REAL[1][6], 8: REAL[1][12]}
        said = drafting.tokens(serve(one, arrivals, 80))
        accepted = sum(one.load().accepted)
    padding = slots.padding
    return said, slots.lengths[:padding].tolist(), slots.last_tokens[:padding, 0].tolist(), accepted


@pytest.mark.long
def test_ranks_say_what_one_rank_says_without_drafts(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    asked = [each for arrivals in REAL for group in arrivals.values() for each in group]
    expected = drafting.tokens(drafting.run(drafting.engine(0), asked))
    jobs = [(tp, dp, serve_rank, case) for tp, dp, *case in CASES]
    for (tp, _, *case), ranks in zip(CASES, run_jobs(jobs, tmp_path), strict=True):
        said = {room: tokens for tokens_of_rank, *_ in ranks for room, tokens in tokens_of_rank.items()}
        assert said == expected, (tp, case)
        assert ranks[0][-1] > 0
        if tp == 2:
            for leader, follower in zip(ranks[::2], ranks[1::2], strict=True):
                assert leader[1:3] == follower[1:3] and any(leader[1]), "they accepted other tokens"
