"""The parts of a rank with a real model. Imports torch."""

from functools import partial
from urllib.parse import urlsplit

import torch
from millrace_common.step_times import StepTimes

from millrace_serve.engine.schedule.factory import UNKNOWN
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.page_sums import PageSums
from millrace_serve.model.config import ModelConfig, ModelConfigError
from millrace_serve.model.parallel import init_parallel, leave_parallel
from millrace_serve.plan import report, splits
from millrace_serve.plan.facts import gpu_here
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.rank.parts import Parts, RankSpec


def build(spec: RankSpec, phases: Phases) -> Parts:
    """Collective over all ranks of the worker."""
    config = spec.config
    assert config.model is not None
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelConfigError("device=cuda: torch sees no GPU; check the driver and the pod's GPU request")
        device = torch.device("cuda", (config.first_gpu + spec.rank) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    wait = config.timeouts.start  # a rank may load or compile for as long as all of them may take
    dims = init_parallel(
        spec.rank, config.tp, config.dp, spec.rendezvous, device, timeout_s=wait, expert_tp=config.expert_tp
    )
    dtype = getattr(torch, config.dtype)
    model = ModelConfig.load(config.model)
    facts = model.vocab_size, config.limits.max_model_len, sorted(model.eos_token_ids)
    address = urlsplit(spec.bind).hostname or "127.0.0.1"  # this host's own for ranks that share it
    rank = load_rank(
        config.limits, config.role, config.model, dims, device, dtype,
        execution=config, phases=phases, address=address,
    )  # fmt: skip
    check = PageSums(rank.pool).wrong if rank.pool.layout.summed else None
    parts = partial(Parts, rank.pool, rank.lockstep.progress, *facts, leave=leave_parallel, check=check, load=rank.load)
    if dims.tp_rank:
        return parts(run=rank.follow)
    return parts(engine=rank.engine(expected_times(config, gpu_here())))


def expected_times(config: WorkerConfig, gpu: str) -> StepTimes:
    """What the plan predicts of a step; unknown where nobody has timed such steps on this kind of GPU."""
    setup = config.setup(gpu)
    return (splits.times(report.ranks_of(setup, config)) if setup is not None else None) or UNKNOWN
