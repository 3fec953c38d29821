"""No request pays for a compilation: after a start with empty caches every kind of request finds its kernels there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine.every_request import BRANCHES, serve
from millrace_bench.checkpoint.export_quantised import export
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.worker.caches import variables
from millrace_testing.checkpoint import write_checkpoint
from millrace_testing.paths import TINY

LIMITS = Limits(num_pages=64, max_model_len=256, max_running=8, max_prefill_tokens=96, draft_batches=(8, 4, 2))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By dtype of the weights: widths that FlashMLA, FlashInfer and DeepGEMM take, and a tokenizer for grammars."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plain, quantised = folder / "bfloat16", folder / "float8"
    plain.mkdir()
    write_checkpoint(plain)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, plain)
    export(plain, quantised)
    return {"bfloat16": plain, "float32": plain, "float8": quantised}


@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_of_every_kind_reach_their_branches(drafts: int) -> None:
    torch.set_num_threads(1)
    limits = LIMITS.model_copy(update={"draft_tokens": drafts})
    execution = Execution.model_validate({"graphs": "on"})
    rank = load_rank(
        limits, Role.UNIFIED, TINY, ParallelDims(), torch.device("cpu"), torch.float32, execution=execution
    )
    seen, _ = serve(rank.engine(), limits)
    assert {*BRANCHES, "graphs", *(["drafts"] if drafts else [])} == {name for name, count in seen.items() if count}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("weights", "kv_dtype", "drafts"),
    [
        ("float32", "auto", 0),
        ("float32", "auto", 3),
        ("bfloat16", "auto", 0),
        ("bfloat16", "float8_e4m3fn", 3),
        ("float8", "auto", 3),
        ("float8", "float8_e4m3fn", 0),
    ],
)
def test_no_request_waits_for_a_compiler(
    weights: str, kv_dtype: str, drafts: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    dtype = "float32" if weights == "float32" else "bfloat16"
    command = [sys.executable, "-m", "engine.every_request", str(checkpoints[weights]), str(tmp_path), dtype]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.run(
        [*command, kv_dtype, str(drafts)], env=os.environ | variables(tmp_path) | paths, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["before"]["triton"] > 10, "the caches were not empty"
    assert found["after"] == found["before"], [
        line for line in process.stderr.splitlines() if "after the start" in line
    ]
    assert {*BRANCHES, "graphs", *(["drafts"] if drafts else [])} == {name for name, n in found["seen"].items() if n}
    assert found["slowest_s"] < 2, found
