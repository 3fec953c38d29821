"""TP, DP + EP and both together over gloo give what one rank gives; replicas have uneven work or none."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.layers import VocabParallel
from millrace_serve.model.parallel import ParallelDims, init_parallel
from millrace_serve.model.weights import Checkpoint
from millrace_testing import HANG_S
from millrace_testing.checkpoint import CONFIG
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from model.ranks import run_jobs
from safetensors.torch import save_file
from torch import Tensor

# Collectives of four processes on few cores take long, so a job has more than one option.
JOBS: dict[str, tuple[int, int, dict[str, Any]]] = {  # tp, dp, options
    "experts": (1, 4, {}),
    "both": (2, 2, {}),
    "fp8, dense_tp=1": (2, 2, {"dense_tp": 1}),
    "expert_tp, dense_tp=2": (4, 1, {"expert_tp": True, "dense_tp": 2}),  # each rank holds a part of every expert
}
SHARED = {"dp": (1, 2, False), "expert-tp": (2, 1, True), "whole experts": (2, 1, False)}  # tp, dp, expert_tp
VOCAB = 1280
TABLE = torch.arange(28.0).view(7, 4)
# Steps of every replica: new tokens of each of its two sequences, and padding rows. Replica 2 idles in the first step
# with no row at all, replica 1 in the second with one padding row; in the third nobody has a row; then all decode.
SCHEDULE: list[list[tuple[tuple[int, int], int]]] = [
    [((65, 3), 0), ((0, 130), 2), ((0, 0), 0), ((7, 0), 1)],
    [((1, 1), 2), ((0, 0), 1), ((64, 64), 0), ((1, 20), 0)],
    [((0, 0), 0)] * 4,
    [((1, 30), 0), ((5, 1), 0), ((1, 1), 3), ((1, 1), 0)],
]


def run_schedule(dims: ParallelDims, path: str, options: dict[str, Any]) -> list[Tensor]:
    """The logits of this replica's rows, step by step."""
    dims = dataclasses.replace(dims, **options)
    driver = Driver(load_model(path, dims, torch.device("cpu"), torch.float32), seed=dims.rank)
    seqs = [Seq(random_prompt(140, VOCAB, 10 * dims.dp_rank + i)) for i in range(2)]
    out = []
    for step in SCHEDULE:
        counts = tuple(sum(nums) + padding for nums, padding in step[: dims.dp])
        nums, padding = step[dims.dp_rank]
        work = [(seq, num) for seq, num in zip(seqs, nums, strict=True) if num]
        out.append(driver.step(work, padding, counts if dims.dp > 1 else ()))
    return out


def run_shared(dims: ParallelDims, path: str, expert_tp: bool) -> tuple[list[Tensor], bool]:
    """Two steps of few rows on FP8 weights; and whether the shared expert is one of the rank's experts."""
    dims = dataclasses.replace(dims, expert_tp=expert_tp)
    model = load_model(path, dims, torch.device("cpu"), torch.float32, keep_quantised=True)
    driver, seq = Driver(model, seed=dims.rank), Seq(random_prompt(20, VOCAB, dims.dp_rank))
    out = []
    for nums in ((7, 9), (1, 0)):
        num = nums[dims.dp_rank]
        counts = nums[: dims.dp] if dims.dp > 1 else ()
        out.append(driver.step([(seq, num)] if num else [], 0, counts))
    mlp = model.layers[1].mlp
    return out, mlp.routed.fuses_shared and mlp.shared_experts is None


def collectives(dims: ParallelDims) -> dict[str, Any]:
    own = torch.full((2, 3), float(dims.rank))
    stacked = torch.stack([own + 10 * replica for replica in range(dims.dp)])
    return {
        "tp_sum": dims.tp_all_reduce(own.clone()),
        "tp_gather": dims.tp_all_gather(own),
        "dp_gather": dims.dp_all_gather(own),
        "dp_scatter": dims.dp_reduce_scatter(stacked),
        "empty": dims.dp_all_gather(own[:0]),
        "exchanges": [
            [one.hex() for one in dims.exchange(data)]
            for data in (bytes([dims.rank]) * dims.rank, b"", b"\0\xff" * 5000)
        ],
        "timeouts": [timeout_s(group) for group in (dims.world_group, dims.tp_group, dims.dp_group)],
    }


def timeout_s(group: dist.ProcessGroup | None) -> float:
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def odd_vocabulary(dims: ParallelDims, path: str) -> tuple[Tensor, Tensor]:
    """Embedding and head over 7 tokens: the last rank holds fewer rows."""
    config = ModelConfig.parse({**CONFIG, "vocab_size": 7, "hidden_size": 4})
    table = VocabParallel(Checkpoint(path, config, torch.device("cpu"), torch.float32), config, dims, "table")
    return dims.tp_all_reduce(table.embed_partial(torch.arange(7))), table.logits(torch.eye(4))


@pytest.fixture(scope="module")
def results(random_bf16: Path, random_fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    paths = {name: str(random_fp8 if "fp8" in name else random_bf16) for name in JOBS}
    jobs = {name: (tp, dp, run_schedule, (paths[name], options)) for name, (tp, dp, options) in JOBS.items()}
    for name, (tp, dp, expert_tp) in SHARED.items():
        jobs[f"shared {name}"] = (tp, dp, run_shared, (str(random_fp8), expert_tp))
    jobs["collectives"] = (2, 2, collectives, ())
    directory = tmp_path_factory.mktemp("ranks")
    save_file({"table": TABLE}, directory / "model.safetensors")
    jobs["odd-vocabulary"] = (4, 1, odd_vocabulary, (str(directory),))
    return dict(zip(jobs, run_jobs(list(jobs.values()), directory), strict=True))


@functools.cache
def alone(replica: int, path: Path) -> list[Tensor]:
    """The same work of one replica on a single rank, without padding."""
    driver = Driver(load_model(path, ParallelDims(), torch.device("cpu"), torch.float32))
    seqs = [Seq(random_prompt(140, VOCAB, 10 * replica + i)) for i in range(2)]
    steps = [step[replica][0] for step in SCHEDULE]
    return [driver.step([(s, n) for s, n in zip(seqs, nums, strict=True) if n]) for nums in steps]


@pytest.mark.parametrize("name", JOBS)
def test_every_rank_has_the_logits_of_its_replica(
    name: str, results: dict[str, list], random_bf16: Path, random_fp8: Path
) -> None:
    (tp, dp, _), path = JOBS[name], random_fp8 if "fp8" in name else random_bf16
    for replica in range(dp):
        expected = alone(replica, path)
        for rank in range(replica * tp, (replica + 1) * tp):
            for step, logits in enumerate(results[name][rank]):
                assert logits.shape == (sum(SCHEDULE[step][replica][0]), VOCAB)
                assert_close(logits, expected[step], MODEL_TOLERANCE)


@pytest.mark.parametrize("name", SHARED)
def test_the_shared_expert_beside_the_routed_ones(name: str, results: dict[str, list], random_fp8: Path) -> None:
    """Each rank's own rows, in the launch of the routed experts; not where ranks of a replica hold whole experts."""
    tp, _, _ = SHARED[name]
    for rank, (steps, fused) in enumerate(results[f"shared {name}"]):
        assert fused == (name != "whole experts")
        alone, seq = Driver(load_model(random_fp8, ParallelDims(), torch.device("cpu"), torch.float32)), rank // tp
        prompt = Seq(random_prompt(20, VOCAB, seq))
        for nums, logits in zip(((7, 9), (1, 0)), steps, strict=True):
            expected = alone.step([(prompt, nums[seq])] if nums[seq] else [])
            assert_close(logits, expected, MODEL_TOLERANCE)


def test_collectives(results: dict[str, list]) -> None:
    for rank, out in enumerate(results["collectives"]):  # tp = dp = 2: replicas {0, 1} and {2, 3}
        tp_rank, dp_rank = rank % 2, rank // 2
        assert (out["tp_sum"] == 4 * dp_rank + 1).all()
        assert out["tp_gather"][:, 0, 0].tolist() == [2 * dp_rank, 2 * dp_rank + 1]
        assert out["dp_gather"][:, 0, 0].tolist() == [tp_rank, tp_rank + 2]
        assert (out["dp_scatter"] == 2 * tp_rank + 2 + 20 * dp_rank).all()
        assert out["empty"].shape == (2, 0, 3)


def test_bytes_of_any_length_reach_every_rank_as_they_are(results: dict[str, list]) -> None:
    for out in results["collectives"]:
        assert out["exchanges"] == [["", "01", "0202", "030303"], [""] * 4, ["00ff" * 5000] * 4]


def test_every_group_has_the_timeout_that_was_asked_for(results: dict[str, list]) -> None:
    assert [out["timeouts"] for out in results["collectives"]] == [[HANG_S] * 3] * 4


def test_vocabulary_that_does_not_divide(results: dict[str, list]) -> None:
    for embedded, logits in results["odd-vocabulary"]:
        assert torch.equal(embedded, TABLE) and torch.equal(logits, TABLE.T)


def test_dims_of_a_rank() -> None:
    dims = ParallelDims(rank=5, tp=2, dp=4)
    assert (dims.tp_rank, dims.dp_rank, dims.world, dims.ep_size, dims.ep_rank) == (1, 2, 8, 8, 5)


def test_one_rank_needs_no_process_group() -> None:
    dims = init_parallel(0, 1, 1, "tcp://127.0.0.1:1", torch.device("cpu"))
    x = torch.ones(2, 3)
    assert dims == ParallelDims() and dims.tp_all_reduce(x) is x
    assert dims.tp_all_gather(x).shape == (1, 2, 3) and torch.equal(dims.dp_reduce_scatter(x[None]), x)


def test_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank=4 .* tp=2 x dp=2"):
        init_parallel(4, 2, 2, "tcp://127.0.0.1:1", torch.device("cpu"))
