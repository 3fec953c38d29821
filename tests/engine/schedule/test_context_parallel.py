"""Long prompts whose chunks all replicas compute together: tokens, logprobs and KV are those of one rank alone."""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.drafting import CPU, GREEDY, SEEDED, questions
from engine.harness import SETTINGS, Driver, FakeReplicas, eager, request
from engine.joined import ranks_together
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.core import Abort, LeaseEnded, Request, RequestId, Route, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.sim.factory import build_sim_engine
from millrace_serve.engine.start.profiling_run import shared_batch
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.model.attn_step import FormThresholds
from millrace_serve.model.context_parallel.split import Split
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import paths
from millrace_testing.oracle import oracle_outputs
from model.ranks import run_jobs
from msgspec import structs
from torch import Tensor

# ------------------------------------------------------------------------------------------------ the division


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 5, 16, 1003])
def test_every_token_has_one_place_and_the_owner_the_last(replicas: int, count: int) -> None:
    owner = replicas - 1
    splits = [Split(owner, me, replicas, 100, 100 + count) for me in range(replicas)]
    rows = [[i for block in split.blocks(split.me) for i in range(*block)] for split in splits]
    assert sorted(chain(*rows)) == list(range(count))
    assert rows[owner][-1] == count - 1
    assert [len(mine) for mine in rows] == [splits[0].num_rows(replica) for replica in range(replicas)]
    ordered = [rows[replica][first:end] for replica, (first, end) in splits[0].order()]
    assert list(chain(*ordered)) == list(range(count))
    assert max(map(len, rows)) <= -(-count // (2 * replicas)) * 2, "an even share of the step has room for it"
    keys = [sum(i + 1 for i in mine) for mine in rows]
    assert count < 1000 or max(keys) < 1.02 * min(keys), "causal attention costs all the same"


# ------------------------------------------------------------------------------------------------ scheduling

SIM = {"num_pages": 90, "page_size": 4, "max_model_len": 160, "max_running": 6, "max_prefill_tokens": 12}
SIM_PROMPTS = [  # (room, prompt tokens, in which step it comes) of each replica
    [(1, 130, 0), (2, 5, 3), (3, 30, 4), (4, 120, 4), (5, 121, 4)],
    [(11, 9, 0), (12, 40, 2), (13, 7, 9)],
    [(21, 100, 1), (22, 26, 8)],
]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.UNIFIED])
def test_turns_go_round_and_nothing_starves(role: Role) -> None:
    config = EngineConfig.model_validate({**SIM, "context_parallel_tokens": 25})
    group, batches, done = FakeReplicas(3), [[], [], []], [{}, {}, {}]

    def replica(rank: int) -> None:
        one = build_sim_engine(config, role, SETTINGS, Lockstep(group.of(rank)))
        batches[rank] = recorded(one)
        route = Route.EXPORT if role is Role.PREFILL else Route.LOCAL
        for step in range(120):
            for room, length, at in SIM_PROMPTS[rank]:
                if step == at:
                    one.submit(Submit(sim_request(room, length, route)))
            if step == 119:
                one.stop()
            events = one.step()
            for output in events.outputs:
                assert output.error is None
                if role is Role.PREFILL:
                    one.submit(LeaseEnded(output.id))
                done[rank].setdefault(output.id.room, (step, []))[1].extend(t.token_id for t in output.tokens)

    ranks_together(replica, 3)
    for rank, prompts in enumerate(SIM_PROMPTS):
        for room, length, _ in prompts:
            tokens = oracle_outputs(sim_request(room, length).token_ids, sim_request(room, length).sampling, SETTINGS)
            assert done[rank][room][1] == tokens[: 1 if role is Role.PREFILL else None]
    owners = check_steps(batches, most_rows=12)
    assert {0, 1, 2} == set(owners)
    assert max(map(owners[:8].count, owners[:8])) <= 5, "turns go round"
    short = [done[rank][room][0] for rank, room in ((0, 2), (1, 13))]
    assert max(short) < done[0][1][0], "short prompts do not wait for the long one"


def test_long_prompt_is_preempted_between_its_chunks() -> None:
    driver = Driver(Role.UNIFIED, num_pages=9, max_prefill_tokens=2, context_parallel_tokens=8)
    batches = recorded(driver.engine)
    driver.run_out(request(1, [20, 21, 22], max_tokens=24), request(2, list(range(30, 50)), max_tokens=3))
    assert driver.scheduler.outbox.counters["preemptions"] == 1
    ends = [batch.shared.split.end for batch in batches if batch.shared is not None]
    assert ends == [*range(1, 10), *range(5, 14)], "it goes on behind its cached page"


def sim_request(room: int, length: int, route: Route = Route.LOCAL) -> Request:
    return request(room, [20 + (room + i) % 9 for i in range(length)], route, max_tokens=4)


def check_steps(batches: list[list[HostBatch]], most_rows: int) -> list[int]:
    """The batches of all replicas agree step by step. Returns the owners of the shared chunks in order."""
    owners = []
    for step in zip(*batches, strict=True):
        rows = tuple(int(batch.num_rows[0]) for batch in step)
        assert all(batch.dp_num_tokens == rows for batch in step)
        for batch in step:
            assert int(batch.num_rows[0]) - batch.num_decode * batch.num_queries <= most_rows
            assert (batch.shared is None) == (step[0].shared is None)
            assert batch.shared is None or not batch.all_decode
        if step[0].shared is not None:
            first = step[0].shared.split
            assert [batch.shared.split.me for batch in step] == list(range(len(step)))
            assert {(s.owner, s.start, s.end) for s in (batch.shared.split for batch in step)} == {
                (first.owner, first.start, first.end)
            }
            assert [len(batch.shared.slots) for batch in step] == [i == first.owner for i in range(len(step))]
            owners.append(first.owner)
    return owners


def recorded(one: Engine) -> list[HostBatch]:
    launch, batches = one._runner.launch, []
    one._runner.launch = lambda batch: (batches.append(batch), launch(batch))[1]
    return batches


# ------------------------------------------------------------------------------------------------ the model

LIMITS = {
    "num_pages": 40, "page_size": 16, "max_model_len": 256, "max_running": 4, "max_prefill_tokens": 48,
    "checks": ("canary", "poison"),
}  # fmt: skip


def long_prompt(length: int, first: int) -> list[int]:
    """Questions in a row: the checkpoint is sure of what follows the last one."""
    text = list(chain(*questions()))[first:] + questions()[1]
    return (text * 3)[:length]


SHARED = long_prompt(96, 0)  # six pages that two prompts begin with
LONG = [
    request(0, SHARED + long_prompt(120, 5), logprobs=1, max_tokens=8, **GREEDY),
    request(1, long_prompt(150, 11), logprobs=1, max_tokens=8, **SEEDED),
    request(2, SHARED + long_prompt(131, 7), logprobs=1, max_tokens=8, **GREEDY),  # begins with cached pages
]
SHORT = [
    request(10, questions()[0][:30], logprobs=1, max_tokens=20, **GREEDY),
    request(11, questions()[1], logprobs=1, max_tokens=24, **SEEDED),
    request(12, questions()[2][:47], logprobs=1, max_tokens=9, **GREEDY),
]
ABORTED = request(3, long_prompt(220, 3), max_tokens=2, **GREEDY)


@dataclass
class Served:
    said: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # tokens and logprobs by room
    kv: dict[int, Tensor] = field(default_factory=dict)  # full pages of each long prompt
    owners: list[int] = field(default_factory=list)
    beside: set[str] = field(default_factory=set)  # what a step with a shared chunk had besides
    accepted: int = 0


def serve(one: Engine, arrivals: dict[int, list[Request]], steps: int, abort: RequestId | None = None) -> Served:
    """`abort`: after the second shared chunk of this request."""
    found, batches = Served(), recorded(one)
    for step in range(steps):
        for each in arrivals.get(step, []):
            one.submit(Submit(each))
        seq = one._scheduler.requests.live.get(abort) if abort else None
        if seq is not None and seq.num_computed >= 90:
            one.submit(Abort(abort))
        if step == steps - 1:
            one.stop()
        events = one.step()
        for output in events.outputs:
            assert output.error is None, output.error
            said = found.said.setdefault(output.id.room, [])
            said += [(token.token_id, token.logprob) for token in output.tokens]
        for part in events.chunks:
            pages = one.pool.view()[part.page_ids].clone()
            found.kv[part.id.room] = torch.cat((found.kv.get(part.id.room, pages[:0]), pages))
    assert not one.has_work(), f"{steps} steps are too few"
    for each in LONG:
        pages, _ = one._scheduler.pages.cache.match(each.token_ids, 99, each.cache_salt)
        if pages:
            found.kv.setdefault(each.id.room, one.pool.view()[pages].clone())
    shared = [batch for batch in batches if batch.shared is not None]
    found.owners = [batch.shared.split.owner for batch in shared]
    found.beside |= {"chunk" for batch in shared if batch.chunk_lens} | {"decode" for b in shared if b.num_decode}
    found.beside |= {"cached" for batch in shared if batch.shared.split.start == len(SHARED)}
    found.accepted = sum(one.load().accepted)
    one.close()
    return found


def load(dims: ParallelDims, role: Role, drafts: int, share: int, graphs: str = "off"):
    limits = Limits.model_validate(
        {**LIMITS, "draft_tokens": drafts, "draft_batches": (9, 2, 1), "context_parallel_tokens": share}
    )
    options = Execution.model_validate({"graphs": graphs})
    rank = load_rank(limits, role, paths.TINY, dims, CPU, torch.float32, execution=options)
    rank.runner._model.thresholds = FormThresholds(0, prefix_chunk_tokens=32)  # several parts of keys
    if share:
        rank.runner.launch(shared_batch(limits, dims.dp, dims.dp_rank)).result()  # as a start on a GPU does
    return rank


def rank_job(dims: ParallelDims, role: Role, drafts: int, graphs: str) -> dict[str, Any]:
    """The fields of Served."""
    torch.manual_seed(0)
    rank = load(dims, role, drafts, share=40, graphs=graphs)
    if dims.tp_rank:
        rank.follow()
        return vars(Served())
    eager(rank.lockstep)
    arrivals = {
        0: {0: [LONG[0]], 14: [LONG[2], SHORT[0]]},
        1: {1: [SHORT[1]], 3: [LONG[1], SHORT[2]], 9: [ABORTED]},
    }.get(dims.dp_rank, {})
    if role is Role.PREFILL:
        arrivals = {
            step: [structs.replace(each, route=Route.EXPORT) for each in group] for step, group in arrivals.items()
        }
    return vars(serve(rank.engine(), arrivals, 90, ABORTED.id))


CASES = (  # tp, dp, role, drafts, graphs
    (1, 2, Role.UNIFIED, 2, "on"),
    (1, 4, Role.PREFILL, 1, "off"),
    (2, 2, Role.UNIFIED, 1, "off"),
)


@pytest.mark.long
def test_shared_prompts_are_what_one_rank_computes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    arrivals = {0: [LONG[0], LONG[1]], 20: [LONG[2], *SHORT]}
    alone = [serve(load(ParallelDims(), Role.UNIFIED, drafts, share=0).engine(), arrivals, 90) for drafts in (0, 1)]
    jobs = [(tp, dp, rank_job, (role, drafts, graphs)) for tp, dp, role, drafts, graphs in CASES]
    for case, ranks in zip(CASES, run_jobs(jobs, tmp_path), strict=True):
        tp, _, role, drafts, _ = case
        leaders = [Served(**fields) for fields in ranks[::tp]]
        assert {0, 1} == set(leaders[0].owners) and all(one.owners == leaders[0].owners for one in leaders), case
        assert role is Role.PREFILL or drafts == 0 or sum(one.accepted for one in leaders) > 0, case
        beside = set.union(*(one.beside for one in leaders))
        assert beside == {"chunk", "cached"} | ({"decode"} if role is Role.UNIFIED else set()), case
        assert leaders[1].said[ABORTED.id.room] == [], "it was not aborted in time"
        for each in (*LONG, *SHORT):
            room = each.id.room
            expected, found = alone[0].said[room], next(one.said[room] for one in leaders if room in one.said)
            check_outputs(found, expected[: 1 if role is Role.PREFILL else None], (case, room))
        for each in LONG:
            room, full = each.id.room, len(each.token_ids) // 16
            expected, found = alone[min(drafts, 1)].kv[room], next(one.kv[room] for one in leaders if room in one.kv)
            assert torch.isfinite(found[:full]).all(), (case, room)
            torch.testing.assert_close(found[:full], expected[:full], rtol=2e-4, atol=2e-4)


def check_outputs(found: list[tuple[int, float]], expected: list[tuple[int, float]], where: object) -> None:
    """Sums in another order: logprobs differ in the last bits."""
    assert [token for token, _ in found] == [token for token, _ in expected], where
    assert max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=True)) < 1e-3, where
