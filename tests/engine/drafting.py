"""The real engine with the trained checkpoint in FP32 on a CPU, with drafts or without.

Pages carry canaries and freed ones are NaN.
"""

import asyncio
import functools
from pathlib import Path

import torch
from millrace_bench.tasks import TASKS
from millrace_router.text.tokenizer import Tokenizer as ChatTokenizer
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Request, SequenceOutput, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.torch_factory import Rank, load_rank
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY

CPU = torch.device("cpu")
EVERY_STEP = (9, 9, 9)  # as many drafts as there may be, whatever the number of sequences
Said = dict[int, list[SequenceOutput]]
Arrivals = dict[int, list[Request]]  # before which of its steps a replica gets which requests
Tokens = dict[int, list[int]]  # by room


@functools.cache
def held(mtp: bool, path: Path = TINY) -> DeepseekV3:
    return load_model(path, ParallelDims(), CPU, torch.float32, mtp=mtp)


def rank_of(limits: Limits, role: Role = Role.UNIFIED, options: Execution | None = None, path: Path = TINY) -> Rank:
    """All ranks of a test process share the model: none changes its weights."""
    own = held(limits.draft_tokens > 0, path)
    return load_rank(limits, role, path, ParallelDims(), CPU, torch.float32, options, model=own)


def engine(
    drafts: int,
    role: Role = Role.UNIFIED,
    graphs: str = "off",
    model: Path = TINY,
    device: torch.device = CPU,
    **limits: object,
) -> Engine:
    wanted = {
        "num_pages": 80, "max_model_len": 256, "max_running": 9, "max_prefill_tokens": 80,
        "checks": ("canary", "poison"), "draft_tokens": drafts, "draft_batches": EVERY_STEP, **limits,
    }  # fmt: skip
    options = Execution.model_validate({"graphs": graphs})
    one = Limits.model_validate(wanted)
    if device == CPU:
        return rank_of(one, role, options, model).engine()
    return load_rank(one, role, model, ParallelDims(), device, torch.float32, options).engine()


def run(one: Engine, requests: list[Request], *, close: bool = True) -> Said:
    said: Said = {request.id.room: [] for request in requests}
    for each in requests:
        one.submit(Submit(each))
    while one.has_work() or one.host.copier.busy or one.load().waiting:  # of those, grammars are being compiled
        for output in one.step().outputs:
            assert output.error is None, output.error
            said[output.id.room].append(output)
    one.check_idle()
    if close:
        one.close()
    return said


def serve(one: Engine, arrivals: Arrivals, num_steps: int) -> Said:
    """All replicas call it, and stop in the same step."""
    said: Said = {}
    step = 0
    while not one.stopped:
        for each in arrivals.get(step, []):
            one.submit(Submit(each))
        step += 1
        if step == num_steps:
            one.stop()
        for output in one.step().outputs:
            assert output.error is None, output.error
            said.setdefault(output.id.room, []).append(output)
    assert not one.has_work(), f"{num_steps} steps are too few"
    one.check_idle()
    one.close()
    return said


def tokens(said: Said) -> Tokens:
    return {room: [token.token_id for output in outputs for token in output.tokens] for room, outputs in said.items()}


@functools.cache
def questions() -> list[list[int]]:
    """What the checkpoint was trained to answer, so that it is sure of most tokens."""
    tokenizer = ChatTokenizer.load(TINY)
    items = [item for task in ("copy", "sort", "chat") for item in TASKS[task].items(0, 1)]
    texts = [tokenizer.render([message._asdict() for message in item.messages]) for item in items]
    return [asyncio.run(tokenizer.encode(text, add_bos=False)) for text in texts]


GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
COUNTED = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
SHAPED = {"temperature": 1.0, "seed": 9, "min_tokens": 12, "logit_bias": {20: 3.0, 30: -5.0}}
