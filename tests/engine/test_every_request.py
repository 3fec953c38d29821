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
from engine.every_request import check_reached, serve
from millrace_bench.checkpoint.export_quantised import export
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.start import startup, torch_factory
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model import deepseek_v3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.worker.caches import variables
from millrace_testing import launches
from millrace_testing.checkpoint import write_checkpoint
from millrace_testing.int4 import write_int4
from millrace_testing.paths import TINY
from millrace_testing.sparse import write_sparse

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


@pytest.mark.long
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="notes what Triton's interpreter would run")
@pytest.mark.parametrize(
    ("weights", "kv_dtype", "drafts"),
    [
        ("float32", "auto", 3),
        ("bfloat16", "auto", 0),
        ("fp8", "float8_e4m3fn", 0),
        ("fp8", "auto", 3),
        ("int8", "auto", 0),
        ("int4", "auto", 0),
        ("sparse", "auto", 3),
    ],
)
def test_requests_of_every_kind_find_rehearsed_kernels(
    weights: str, kv_dtype: str, drafts: int, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step behind cached tokens once compiled attention again, for 12 s in FP32: for the width of the page
    table, the address of a part of it, and the numbers of sequences and queries.
    """
    torch.set_num_threads(1)
    for module in (deepseek_v3, startup):
        monkeypatch.setattr(module, "runs_quantised", lambda device, dtype: True)

    def prepare(site: startup.Site, config: EngineConfig, runner: TorchRunner, phases: Phases) -> None:
        startup.compile_kernels(site, config, runner)
        startup.prepare(site, config, runner, phases)

    monkeypatch.setattr(torch_factory, "prepare", prepare)
    limits = LIMITS.model_copy(update={"draft_tokens": drafts})
    execution = Execution.model_validate({"graphs": "on", "kv_dtype": kv_dtype})
    dtype, device = torch.float32 if weights == "float32" else torch.bfloat16, torch.device("cpu")
    with launches.noted() as variants:
        rank = torch_factory.load_rank(
            limits, Role.UNIFIED, checkpoints[weights], ParallelDims(), device, dtype, execution=execution
        )
        rehearsed = set(variants)
        seen, _ = serve(rank.engine(), limits)
    assert len(rehearsed) > 30 and variants == rehearsed, launches.differences(rehearsed, variants)
    check_reached(seen, drafts)


@pytest.mark.gpu
@pytest.mark.timeout(600)
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
    process = subprocess.run(
        [*command, kv_dtype, str(drafts)], env=os.environ | variables(tmp_path) | paths, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["before"]["triton"] > 10, "the caches were not empty"
    assert found["after"] == found["before"], [
        line for line in process.stderr.splitlines() if "after the start" in line
    ]
    check_reached(found["seen"], drafts)
    assert found["slowest_s"] < 2, found
