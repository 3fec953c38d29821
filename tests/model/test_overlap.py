"""Steps in two parts, which see the rows and keys of the whole, take turns alike on all ranks, and give its logits."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_bench.kernels.numeric import MODEL_TOLERANCE, assert_close
from millrace_kernels.fp8 import Operand
from millrace_kernels.peer.exchange import Exchange
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.peer import PeerExperts
from millrace_serve.model.experts.routed import RoutedExperts
from millrace_serve.model.inputs import AttnPlan, ForwardInput, SharedRows
from millrace_serve.model.lane import Lane, Stages, straight
from millrace_serve.model.overlap import NEVER, Overlap, OverlapThresholds, alternate
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from model.harness import Driver, Seq, random_prompt
from model.ranks import run_jobs
from torch import Tensor

CPU, VOCAB, ALWAYS = torch.device("cpu"), 1280, OverlapThresholds(1, 1)
# Steps of every replica: new tokens of each of its two sequences, and padding rows. Cut are: the prompt of 130 tokens,
# the one of 66 behind cached tokens, prompts in the middle of a page. Replica 1 idles in the third step and has one
# row in the fourth; in the fifth nobody has a row.
SCHEDULE: list[list[tuple[tuple[int, int], int]]] = [
    [((65, 3), 0), ((0, 130), 2)],
    [((1, 66), 1), ((40, 1), 0)],
    [((1, 1), 0), ((0, 0), 0)],
    [((9, 0), 0), ((1, 0), 0)],
    [((0, 0), 0), ((0, 0), 0)],
    [((1, 1), 3), ((1, 1), 3)],
]
triton_interpreter.install()


# ------------------------------------------------------------------------------------------------ the parts


def step_of(q_lens: tuple[int, ...], cached: tuple[int, ...], num_decode: int, padding: int) -> ForwardInput:
    rows, lens = torch.arange(sum(q_lens) + padding), [q + c for q, c in zip(q_lens, cached, strict=True)]
    table = torch.arange(len(q_lens), dtype=torch.int32)[:, None]
    attn = AttnPlan(num_decode, torch.tensor(lens, dtype=torch.int32), table, q_lens, tuple(lens))
    real = torch.tensor([sum(q_lens)], dtype=torch.int32) if padding else None
    return ForwardInput(rows, 2 * rows, 3 * rows, attn, rows, (len(rows), 7), num_tokens=real)


def keys(attn: AttnPlan) -> list[tuple[int, int]]:
    """(sequence, keys that it sees) of each row."""
    lens = attn.seq_lens.tolist()
    assert tuple(lens) == attn.seq_lens_host
    rows = zip(attn.page_table[:, 0].tolist(), attn.q_lens_host, lens, strict=True)
    return [(seq, length - q + 1 + i) for seq, q, length in rows for i in range(q)]


@pytest.mark.parametrize("padding", [0, 1, 6])
@pytest.mark.parametrize(
    ("q_lens", "cached", "num_decode"),
    [
        ((9,), (0,), 0), ((9,), (70,), 0), ((4, 4), (0, 3), 0), ((1, 1, 1), (5, 6, 7), 3), ((3, 3, 3), (5, 6, 7), 3),
        ((2, 2, 5, 1), (5, 6, 0, 4), 2), ((1,), (5,), 1), ((), (), 0),
    ],
)  # fmt: skip
def test_parts_are_the_whole(q_lens: tuple[int, ...], cached: tuple[int, ...], num_decode: int, padding: int) -> None:
    step = step_of(q_lens, cached, num_decode, padding)
    first, second = parts = Overlap(CPU, ALWAYS).halves(step)
    assert [len(part.token_ids) for part in parts] == [part.dp_num_tokens[0] for part in parts]
    assert [part.dp_num_tokens[1] for part in parts] == [3, 4]
    for name in ("token_ids", "positions", "kv_slots"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(step, name))
    assert keys(first.attn) + keys(second.attn) == keys(step.attn)
    decode = sum(q_lens[:num_decode])
    assert [sum(part.attn.q_lens_host[: part.attn.num_decode]) for part in parts] == [
        min(decode, len(first.token_ids)),
        max(decode - len(first.token_ids), 0),
    ]
    if padding:
        real = [min(int(part.num_tokens), len(part.token_ids)) for part in parts]  # type: ignore[arg-type]
        assert sum(real) == sum(q_lens) and all(num >= 0 for num in real)
    assert [part.lane.index for part in parts] == [0, 1]


def test_a_step_is_cut_from_its_threshold_on() -> None:
    rows = {"decode": 200, "prefill": 5000}
    step = step_of((1,), (0,), 1, 0)

    def cut(*counts: int, shared: SharedRows | None = None) -> bool:
        inputs = ForwardInput(*[step.token_ids] * 3, step.attn, step.token_ids, counts, shared)
        return OverlapThresholds(**rows).cuts(inputs)

    assert [cut(199, 0), cut(0, 200), cut(1024, 1), cut(1025, 0), cut(0, 5000)] == [False, True, True, False, True]
    assert not cut() and not cut(6000, 6000, shared=mock.Mock(SharedRows))
    assert not OverlapThresholds().ever and OverlapThresholds(prefill=1).ever and NEVER > 1 << 40


def test_parts_take_turns() -> None:
    said: list[str] = []

    def part(name: str, pauses: int):
        for i in range(pauses):
            said.append(f"{name}{i}")
            yield
        return name

    assert alternate([part("a", 3), part("b", 1)]) == ["a", "b"] and said == ["a0", "b0", "a1", "a2"]
    assert straight(part("c", 2)) == "c" and said[4:] == ["c0", "c1"]


# ------------------------------------------------------------------------------------------------ the transfers

MOST_ROWS, LAYERS = 8, 2
Transfer = tuple[int, str, tuple[int, ...]]  # lane, what travels, rows of every rank


class Site:
    """A rank that notes what it sends, in the place of exchanges, experts and torch.distributed."""

    def __init__(self, rank: int, size: int) -> None:
        self.dims, self.sent = ParallelDims(rank=rank, dp=size), list[Transfer]()

    def peer(self) -> PeerExperts:
        experts = object.__new__(PeerExperts)
        experts.exchanges = tuple(self._exchange(lane) for lane in range(2))
        experts.held, experts.places, experts.fuses_shared, experts.fp8_rows = mock.Mock(), mock.Mock(), False, False
        return experts

    def _exchange(self, lane: int) -> Exchange:
        def note(kind: str, rows: int, counts: list[int]) -> None:
            assert rows == counts[self.dims.dp_rank] and 0 < max(counts) <= MOST_ROWS
            self.sent.append((lane, kind, tuple(counts)))

        def combine(ids: Tensor, places: object, counts: list[int], **_: object) -> Tensor:
            note("combine", len(ids), counts)
            return torch.zeros(len(ids), 1)

        dispatch = lambda x, weights, ids, places, counts, **_: note("dispatch", len(x), counts) or mock.Mock()  # noqa: E731
        return mock.Mock(most_rows=MOST_ROWS, dispatch=dispatch, combine=combine)

    def gather(self) -> GatherExperts:
        experts = object.__new__(GatherExperts)
        experts.dims = mock.Mock(dp=self.dims.dp, dp_rank=self.dims.dp_rank)
        experts.dims.dp_all_gather = lambda x: self._collective("gather", x, x.expand(self.dims.dp, *x.shape))
        experts.dims.dp_reduce_scatter = lambda x: self._collective("scatter", x, x[0])
        experts.held = lambda rows, *_: rows.plain  # type: ignore[assignment]
        experts.fuses_shared = False
        return experts

    def _collective(self, kind: str, x: Tensor, result: Tensor) -> Tensor:
        self.sent.append((0, kind, tuple(x.shape)))
        return result

    def run(self, experts: RoutedExperts, step: ForwardInput) -> None:
        def part(inputs: ForwardInput) -> Stages[None]:
            num = len(inputs.token_ids)
            for _ in range(LAYERS):  # as Moe.stages does
                h, ids = Operand(torch.zeros(num, 1), None), torch.zeros(num, 2, dtype=torch.int32)
                rest = experts.begin(h, torch.zeros(num, 2), ids, inputs)
                yield
                assert len((yield from rest)) == num

        alternate([part(half) for half in Overlap(CPU, ALWAYS).halves(step)])


@pytest.mark.parametrize("exchange", ["peer", "gather"])
@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 5 * MOST_ROWS), min_size=2, max_size=4))
def test_all_ranks_make_the_same_transfers_in_the_same_order(exchange: str, counts: list[int]) -> None:
    """A rank waits in a transfer for all others, so one that made another one there would make all wait for ever.

    Also where a rank has no row, one part has none on any rank, or one part needs more exchanges than the other.
    """
    sites = [Site(rank, len(counts)) for rank in range(len(counts))]
    for site, count in zip(sites, counts, strict=True):
        step = step_of((count,) if count else (), (3,) if count else (), 0, 0)
        site.run(getattr(site, exchange)(), replace(step, dp_num_tokens=tuple(counts)))
    sent = sites[0].sent
    assert all(site.sent == sent for site in sites)
    halves = [max(count // 2 for count in counts), max(-(-count // 2) for count in counts)]
    if exchange == "gather":
        assert [kind for _, kind, _ in sent].count("scatter") == LAYERS * sum(rows > 0 for rows in halves)
        return
    for lane, rows in enumerate(halves):  # the buffers of a lane hold the rows of one exchange at a time
        kinds = [kind for of, kind, _ in sent if of == lane]
        assert kinds == ["dispatch", "combine"] * (LAYERS * -(-rows // MOST_ROWS))


# ------------------------------------------------------------------------------------------------ the model


def run_model(dims: ParallelDims, path: str, overlap: bool, peer: bool) -> tuple[list[Tensor], list[list[int]]]:
    """Logits of this replica's rows step by step, and the lanes of its transfers in order."""
    experts = None
    if peer:
        assert dims.dp_group is not None
        config = ModelConfig.load(path)
        facts = (dims.dp_group, CPU, 24, config.hidden_size, config.num_experts_per_tok + 1, torch.float32)
        experts = functools.partial(PeerExperts, (Exchange(*facts), Exchange(*facts)))
    driver = Driver(load_model(path, dims, CPU, torch.float32, experts=experts), seed=dims.rank)
    assert driver.model.overlap is not None
    driver.model.overlap.thresholds = ALWAYS if overlap else OverlapThresholds()
    seqs = [Seq(random_prompt(140, VOCAB, 10 * dims.dp_rank + i)) for i in range(2)]
    out, lanes, begin = [], [], Lane.begin
    for step in SCHEDULE:
        nums, padding = step[dims.dp_rank]
        used: list[int] = []
        with mock.patch.object(
            Lane, "begin", lambda lane, work, used=used: (used.append(lane.index), begin(lane, work))[1]
        ):
            work = [(seq, num) for seq, num in zip(seqs, nums, strict=True) if num]
            out.append(driver.step(work, padding, tuple(sum(nums) + padding for nums, padding in step)))
        lanes.append(used)
    return out, lanes


@pytest.mark.long  # 20 s; steps in two parts are off, and their order of transfers is tested above
def test_logits_of_a_step_in_parts(random_bf16: Path, tmp_path: Path) -> None:
    cases = [(overlap, peer) for peer in (False, True) for overlap in (False, True)]
    results = run_jobs([(1, 2, run_model, (str(random_bf16), *case)) for case in cases], tmp_path)
    for whole, parts in zip(results[::2], results[1::2], strict=True):
        for (expected, before), (found, lanes) in zip(whole, parts, strict=True):
            for logits, of_whole in zip(found, expected, strict=True):
                assert_close(logits, of_whole, MODEL_TOLERANCE)
            assert not any(map(any, before))
            assert lanes == parts[0][1], "all ranks send in one order"
            assert [set(used) for used in lanes] == [{0, 1}] * 4 + [set()] + [{0, 1}]
            turns = [[lane for lane, _ in groupby(used)] for used in lanes]
            assert all(order == [0, 1] * (len(order) // 2) for order in turns), turns
