"""No request pays for a compilation: after a start with empty caches every kind of request finds its kernels there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.every_request import check_reached, not_as_wanted, serve, serve_as_replica
from engine.harness import eager
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.start import startup, torch_factory
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model import deepseek_v3
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.worker.caches import variables
from millrace_testing import launches
from millrace_testing.checkpoint import write_checkpoint
from millrace_testing.int4 import write_int4
from millrace_testing.paths import TINY
from millrace_testing.sparse import write_sparse
from model.ranks import run_jobs

LIMITS = Limits(num_pages=64, max_model_len=256, max_running=8, max_prefill_tokens=96, draft_batches=(8, 4, 2))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By form of the weights: widths that FlashMLA, FlashInfer and DeepGEMM take, and a tokenizer for grammars."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plain = folder / "plain"
    plain.mkdir()
    write_checkpoint(plain)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, plain)
    for form in ("fp8", "int8"):
        export(plain, folder / form, form)
    made = {form: folder / form for form in ("fp8", "int8")}
    made["int4"] = write_int4(folder / "int4", plain)
    made["sparse"] = write_sparse(folder / "sparse", plain, index_topk=128)
    return {"bfloat16": plain, "float32": plain, **made}


def as_on_a_gpu(replace: Callable[[object, str, object], None]) -> None:
    """A start on a CPU rehearses, and keeps the forms of weights, of a GPU."""
    for module in (deepseek_v3, startup):
        replace(module, "runs_quantised", lambda device, dtype: True)
    prepared = startup.prepare

    def prepare(setup: startup.RankSetup, config: EngineConfig, runner: TorchRunner, phases: Phases) -> None:
        startup.compile_kernels(setup, config, runner)
        prepared(setup, config, runner, phases)

    replace(torch_factory, "prepare", prepare)


@pytest.mark.long
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="notes what Triton's interpreter would run")
@pytest.mark.parametrize(
    ("weights", "kv_dtype", "drafts"),
    [
        ("fp8", "float8_e4m3fn", 3),
        ("int8", "auto", 0),
        ("int4", "auto", 0),
        ("sparse", "auto", 3),
    ],
)
def test_requests_of_every_kind_find_warmed_kernels(
    weights: str, kv_dtype: str, drafts: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step behind cached tokens once compiled attention again, for 12 s in FP32: for the width of the page
    table, the address of a part of it, and the numbers of sequences and queries.
    """
    torch.set_num_threads(1)
    as_on_a_gpu(monkeypatch.setattr)
    limits = LIMITS.model_copy(update={"draft_tokens": drafts})
    execution = Execution.model_validate({"graphs": "on", "kv_dtype": kv_dtype})
    device = torch.device("cpu")
    with launches.noted() as variants:
        rank = torch_factory.load_rank(
            limits, Role.UNIFIED, checkpoints[weights], ParallelDims(), device, torch.bfloat16, execution=execution
        )
        warmed = set(variants)
        seen, _ = serve(rank.engine(), limits)
    assert len(warmed) > 30 and variants == warmed, launches.differences(warmed, variants)
    check_reached(seen, drafts)


@pytest.mark.long
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="notes what Triton's interpreter would run")
def test_replicas_find_warmed_kernels(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The exchange's own kernels are not among them: on a CPU replicas exchange by `gather`."""
    (found,) = run_jobs([(1, 2, replica_variants, (checkpoints["fp8"], tmp_path))], tmp_path)
    for warmed, late, seen in found:
        assert warmed > 30 and not late, late
        check_reached(seen, 2, "no row", "shared chunk")


def replica_variants(dims: ParallelDims, checkpoint: Path, folder: Path) -> tuple[int, list[str], dict[str, int]]:
    """How many variants one of two replicas warmed, which others its requests launched, and what these reached."""

    def over() -> bool:
        (folder / f"{dims.dp_rank} is over").touch()
        return len(list(folder.glob("* is over"))) == dims.dp

    as_on_a_gpu(setattr)
    limits = LIMITS.model_copy(update={"context_parallel_tokens": 100, "draft_tokens": 2})
    execution = Execution(graphs="on")
    with launches.noted() as variants:
        rank = torch_factory.load_rank(
            limits, Role.UNIFIED, checkpoint, dims, torch.device("cpu"), torch.bfloat16, execution=execution
        )
        eager(rank.lockstep)
        warmed = set(variants)
        seen = serve_as_replica(rank.engine(), limits, dims.dp_rank, over)
    return len(warmed), launches.differences(warmed, variants), dict(seen)


@pytest.mark.gpu
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("weights", "kv_dtype", "drafts"),
    [
        ("float32", "auto", 0),
        ("float32", "auto", 3),
        ("bfloat16", "auto", 0),
        ("bfloat16", "float8_e4m3fn", 3),
        ("fp8", "auto", 3),
        ("fp8", "float8_e4m3fn", 0),
        ("int4", "auto", 0),
        ("sparse", "auto", 3),
    ],
)
def test_no_request_waits_for_a_compiler(
    weights: str, kv_dtype: str, drafts: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    dtype = "float32" if weights == "float32" else "bfloat16"
    command = [sys.executable, "-m", "engine.every_request", str(checkpoints[weights]), str(tmp_path), dtype]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment, errors = os.environ | variables(tmp_path) | paths, tmp_path / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.run(
            [*command, kv_dtype, str(drafts)], env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    found = json.loads((process.stdout.splitlines() or ["{}"])[-1])
    wrong = [f"exit code {process.returncode}"] if process.returncode else faults(found, drafts)
    assert not wrong, "\n".join((*wrong, json.dumps(found, indent=1), errors.read_text()[-12000:]))


def faults(found: dict[str, Any], drafts: int) -> list[str]:
    """What is wrong with what engine/every_request.py printed."""
    wrong = []
    if found["had"]["triton"] != [0, 0] or found["has"]["triton"][0] <= 30:
        wrong.append("it was no cold start: Triton's folder had files before, or has few after")
    if found["after"] != found["before"]:
        wrong.append(f"compiled after the start: {found['before']} before, {found['after']} behind the requests")
    if found["slowest"][0][0] >= 2:
        wrong.append(f"a step took {found['slowest'][0][0]:.1f} s")
    if different := not_as_wanted(found["seen"], drafts):
        wrong.append(f"not reached, or reached unexpectedly: {sorted(different)}")
    return wrong
