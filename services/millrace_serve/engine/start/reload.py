"""Other weights for a rank that runs, in the places of those that it has."""

from pathlib import Path

import torch

from millrace_serve.engine.start.startup import RankSetup
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.checkpoint.checkpoint_hash import checkpoint_hash
from millrace_serve.model.checkpoint.shapes import check_headers
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, open_checkpoint


def load(setup: RankSetup, model: DeepseekV3, runner: TorchRunner, path: Path, check: bool) -> str:
    """Between two steps. Returns the checkpoint's hash.

    Tensors keep their addresses, so graphs go on. One part of the model at a time is there twice.

    Args:
        check: only look at the headers, and return "".
    Raises:
        ModelConfigError, ValueError: the checkpoint cannot take the place of the present one.
        CheckpointError: likewise; without `check` some weights may be the new ones already.
    """
    _check(setup, path)
    if check:
        return ""

    def replace() -> None:
        mtp = setup.model.num_nextn_predict_layers > 0
        with open_checkpoint(path, setup.device, setup.dtype, mtp=mtp) as (checkpoint, _):
            model.load(checkpoint)
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
            torch.cuda.empty_cache()  # what was there twice

    runner.call(replace)
    return checkpoint_hash(path)


def _check(setup: RankSetup, path: Path) -> None:
    if setup.execution.random_weights:
        raise ValueError("random_weights=true: the worker serves no checkpoint")
    config = ModelConfig.load(path)
    ours = setup.model.model_dump()
    theirs = (config if setup.model.num_nextn_predict_layers else config.without_mtp()).model_dump()
    if set(theirs["eos_token_ids"]) <= set(ours["eos_token_ids"]):  # trainers often write no generation_config.json
        theirs["eos_token_ids"] = ours["eos_token_ids"]
    if other := [f"{key}={theirs[key]!r}, not {ours[key]!r}" for key in ours if theirs[key] != ours[key]]:
        raise ValueError(f"its configuration differs from that of the loaded weights: {'; '.join(other)}")
    check_headers(path, mtp=setup.model.num_nextn_predict_layers > 0)
