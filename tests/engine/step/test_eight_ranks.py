"""Eight ranks say what one says, in every step beside replicas that have nothing, prompts or sequences, with drafts,
and with a random pause before every step of every rank.
"""

import random
import time
from pathlib import Path

import pytest
import torch
from engine import drafting
from engine.drafting import CPU, GREEDY, SEEDED, Tokens, questions, serve
from engine.harness import eager, request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.start.torch_factory import Rank, load_rank
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.engine.step.runner import StepHandle
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import checkpoint
from millrace_testing.paths import TINY
from millrace_testing.tolerances import LOGPROB_TOLERANCE
from model.ranks import run_jobs

LIMITS = {"num_pages": 80, "max_model_len": 256, "max_running": 8, "max_prefill_tokens": 60, "checks": ("canary",)}
NUM_REQUESTS = {0: 40, 2: 16}  # by drafts
EVERY = 5  # steps from one request to the next
DELAYED = 200  # launches of each rank without drafts, at least
PAUSE_S, PAUSE_CYCLES = 0.01, 4_000_000  # the longest, of the host and of a device
Case = tuple[int, int, int, str, str]  # tp, dp, drafts, graphs, exchange
Logprobs = dict[int, list[float]]  # by room
# tokens, logprobs, launches, launches without a token here and with some elsewhere, accepted drafts
Served = tuple[Tokens, Logprobs, int, int, int]


def asked(drafts: int = 0) -> list[Request]:
    """Only those that are sampled bring log-probabilities: steps of greedy ones alone take no more than an argmax."""
    sampling = [{**SEEDED, "seed": room, "logprobs": 0} if room % 2 else GREEDY for room in range(NUM_REQUESTS[drafts])]
    return [
        request(room, questions()[room % 3], max_tokens=24, ignore_eos=True, **how) for room, how in enumerate(sampling)
    ]


def serve_rank(dims: ParallelDims, model: Path, drafts: int, graphs: str, exchange: str, cuda: bool) -> Served:
    """Requests go to the replicas in turns. A follower says nothing."""
    limits = Limits.model_validate({**LIMITS, "draft_tokens": drafts, "draft_batches": (8,) * drafts})
    options = Execution.model_validate({"graphs": graphs, "exchange": exchange})
    device = torch.device("cuda", dims.rank) if cuda else CPU
    rank = load_rank(limits, Role.UNIFIED, model, dims, device, torch.float32, execution=options)
    loads = paused(rank, random.Random(dims.rank), cuda)
    said: drafting.Said = {}
    accepted = 0
    if dims.tp_rank:
        rank.follow()
    else:
        eager(rank.lockstep)
        one = rank.engine()
        mine = {EVERY * room: [each] for room, each in enumerate(asked(drafts)) if room % dims.dp == dims.dp_rank}
        said = serve(one, mine, EVERY * NUM_REQUESTS[drafts] + 50)
        accepted = sum(one.load().accepted)
    idle = sum(any(load) and not load[dims.dp_rank] for load in loads if load)
    return drafting.tokens(said), logprobs(said), len(loads), idle, accepted


def logprobs(said: drafting.Said) -> Logprobs:
    return {
        room: [token.logprob for output in outputs for token in output.tokens if token.logprob is not None]
        for room, outputs in said.items()
    }


def paused(rank: Rank, rng: random.Random, cuda: bool) -> list[tuple[int, ...]]:
    """The tokens of each replica (none if dp = 1) in every step from now on, before which this rank waits."""
    launch, loads = rank.runner.launch, list[tuple[int, ...]]()

    def late(batch: HostBatch) -> StepHandle:
        loads.append(batch.dp_num_tokens)
        time.sleep(PAUSE_S * rng.random())
        if cuda:
            torch.cuda._sleep(int(PAUSE_CYCLES * rng.random()))  # on the stream of the runner's thread, the default one
        return launch(batch)

    rank.runner.launch = late  # type: ignore[method-assign]
    return loads


def check(cases: list[Case], model: Path, folder: Path, cuda: bool = False) -> None:
    tokens, wanted = alone(model, cuda)
    jobs = [(tp, dp, serve_rank, (model, *rest, cuda)) for tp, dp, *rest in cases]
    for case, ranks in zip(cases, run_jobs(jobs, folder, cuda=cuda), strict=True):
        tp, dp, drafts, *_ = case
        said, found = ({room: one for rank in ranks for room, one in rank[part].items()} for part in (0, 1))
        assert said == {room: tokens[room] for room in range(NUM_REQUESTS[drafts])}, case
        for room, values in found.items():
            assert values == pytest.approx(wanted[room], abs=LOGPROB_TOLERANCE, rel=0), (case, room)
        launched = {count for _, _, count, _, _ in ranks}
        assert len(launched) == 1, "an idle replica steps with the others"
        assert drafts or launched.pop() >= DELAYED, case
        assert dp == 1 or all(idle for *_, idle, _ in ranks), case
        if model == TINY:  # random weights foresee nothing
            assert all((accepted > 0) is (drafts > 0) for *_, accepted in ranks[::tp]), case


def alone(model: Path, cuda: bool) -> tuple[Tokens, Logprobs]:
    """One rank."""
    device = torch.device("cuda", 0) if cuda else CPU
    said = drafting.run(drafting.engine(0, model=model, device=device), asked())
    return drafting.tokens(said), logprobs(said)


@pytest.fixture
def eight_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Random weights: the trained model has two heads.

    The gain of their head keeps ties away: on a CPU the likeliest token of each greedy step leads the second by 0.0136
    or more in log-probability, 45 times the tolerance of rounding. So tokens are compared as they are, although eight
    ranks add up in another order than one.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        monkeypatch.setitem(checkpoint.CONFIG, name, 8)
    checkpoint.write_checkpoint(tmp_path)
    return tmp_path


STEPS = [(0, "off"), (2, "on")]  # drafts, graphs


@pytest.mark.long
def test_replicas_and_heads_of_each_rank(eight_heads: Path, tmp_path: Path) -> None:
    plain, drafted = STEPS
    check([(1, 8, *plain, "gather"), (8, 1, *drafted, "auto")], eight_heads, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 8, reason="needs eight CUDA devices")
def test_eight_gpus(eight_heads: Path, tmp_path: Path) -> None:
    steps = [*STEPS, (0, "on")]
    replicas = [(tp, dp, *step, name) for tp, dp in ((1, 8), (2, 4)) for step in steps for name in ("gather", "peer")]
    check(replicas, TINY, tmp_path, cuda=True)
    check([(8, 1, *step, "auto") for step in steps], eight_heads, tmp_path, cuda=True)
