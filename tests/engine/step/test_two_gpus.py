"""Two GPUs that share every product (tp=2) answer long prompts for more than a thousand steps: sums over peer memory of
rows that are FP8, which no model in float32 has, in graphs and outside.
"""

import faulthandler
import random
from pathlib import Path

import pytest
import torch
from engine.harness import request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Submit
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY
from model import ranks

ROUNDS, PROMPTS, LONGEST, TOKENS = 60, 8, 4028, 4
START_S, STEP_S = 600.0, 30.0  # with empty caches; of a step that hangs
LIMITS = {"num_pages": "auto", "max_model_len": 4096, "max_running": 128, "prefix_cache": False}


def serve(dims: ParallelDims, model: Path) -> list[int]:
    """How many tokens each round had. A rank that hangs writes its stacks and ends, and the other one with it."""
    faulthandler.dump_traceback_later(START_S, exit=True)
    limits, execution = Limits.model_validate(LIMITS), Execution(memory_fraction=0.3)
    device = torch.device("cuda", dims.rank)
    rank = load_rank(limits, Role.UNIFIED, model, dims, device, torch.bfloat16, execution=execution)
    if dims.tp_rank:
        faulthandler.cancel_dump_traceback_later()
        rank.follow()
        return []
    engine, rng, rounds = rank.engine(), random.Random(0), []
    for number in range(ROUNDS):
        for index in range(PROMPTS):
            prompt = [rng.randrange(10, 1000) for _ in range(LONGEST - rng.randrange(10))]
            engine.submit(Submit(request(PROMPTS * number + index, prompt, max_tokens=TOKENS, ignore_eos=True)))
        said = 0
        while engine.has_work():
            faulthandler.dump_traceback_later(STEP_S, exit=True)
            for output in engine.step().outputs:
                assert output.error is None, output.error
                said += len(output.tokens)
        rounds.append(said)
    faulthandler.cancel_dump_traceback_later()
    engine.close()
    return rounds


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_thousand_steps_over_two_gpus_end(tmp_path: Path) -> None:
    """They hung behind some hundred, when warps of the sum waited for scales that another warp had taken."""
    export(TINY, tmp_path / "fp8", "fp8")
    ((rounds, _),) = ranks.run_jobs([(2, 1, serve, (tmp_path / "fp8",))], tmp_path, cuda=True)
    assert rounds == [PROMPTS * TOKENS] * ROUNDS
