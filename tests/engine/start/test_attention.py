"""The key `attention`: which form and which kernels a rank's steps run, and that its answers stay the same."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine.harness import request, said
from millrace_kernels import backend
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.start import finite
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model import mla
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from millrace_testing.paths import TINY

LIMITS = Limits(num_pages=64, page_size=16, max_model_len=128, max_running=2, max_prefill_tokens=64)
PROMPT = [20 + 7 * i % 400 for i in range(40)]
OURS = {f"millrace_kernels.triton.{phase}:{phase}" for phase in backend.PHASES}


@pytest.fixture(autouse=True)
def as_measured() -> Any:
    triton_interpreter.install()
    torch.set_num_threads(1)
    yield
    backend.prefer((), torch.device("cpu"))


@pytest.mark.parametrize(
    ("attention", "gathered", "kernels"),
    [
        ((), False, set()),
        (("absorbed",), False, set()),
        (("expanded",), True, set()),
        (("expanded", "triton"), True, OURS),
        (("triton", "absorbed"), False, OURS),
    ],
)
def test_what_is_chosen_runs(
    attention: tuple[str, ...], gathered: bool, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt twice: the second time 32 of its tokens are cached, whose rows are gathered to be expanded."""
    load, gather = Mock(wraps=backend._load), Mock(wraps=mla.kv_gather)
    monkeypatch.setattr(backend, "_load", load)
    monkeypatch.setattr(mla, "kv_gather", gather)
    answers = []
    for words in ((), attention):
        load.reset_mock()
        gather.reset_mock()
        with monkeypatch.context() as start:
            start.setattr(finite, "check", lambda *_: None)  # a step with all kernels
            if "triton" in words:  # whose kernels are interpreted here
                start.setattr(backend, "capability", lambda device: "sm90")
            options = Execution.model_validate({"attention": words})
            rank = load_rank(
                LIMITS, Role.UNIFIED, TINY, ParallelDims(), torch.device("cpu"), torch.float32, execution=options
            )
        rank.runner._model.layers[2:] = []
        engine = rank.engine()
        heard = said(engine, [request(1, PROMPT, max_tokens=1, logprobs=0)], close=False)
        heard |= said(engine, [request(2, PROMPT, max_tokens=3, logprobs=0)])
        answers.append(heard)
    assert (gather.called, {call.args[0] for call in load.call_args_list}) == (gathered, kernels)
    for room, answer in answers[0].items():
        assert [token for token, _ in answers[1][room]] == [token for token, _ in answer]
        assert [p for _, p in answers[1][room]] == pytest.approx([p for _, p in answer], abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "decode", "prompts"),
    [
        ((), "lib.flash_mla", "lib.flashinfer"),
        (("flashinfer", "flash_mla", "absorbed"), "lib.flash_mla", "lib.flashinfer"),
        (("triton", "expanded"), "triton.mla_decode", "triton.mla_prefill"),
        (("flash_mla", "triton"), "lib.flash_mla", "triton.mla_prefill"),
    ],
)
def test_what_is_chosen_runs_on_a_gpu(
    attention: tuple[str, ...], decode: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Mock(wraps=backend._load)
    monkeypatch.setattr(backend, "_load", load)
    limits = Limits(num_pages=64, max_model_len=256, max_running=8, max_prefill_tokens=128)
    options = Execution.model_validate({"attention": attention, "memory_fraction": 0.3})
    device = torch.device("cuda", torch.cuda.current_device())
    one = load_rank(limits, Role.UNIFIED, TINY, ParallelDims(), device, torch.bfloat16, execution=options).engine()
    heard = said(one, [request(room, PROMPT * 2 + [room], max_tokens=9, logprobs=0) for room in range(8)])
    assert all(len(answer) == 9 for answer in heard.values())
    phases = {call.args[0] for call in load.call_args_list if call.args[0].endswith(backend.PHASES)}
    assert phases == {f"millrace_kernels.{decode}:mla_decode", f"millrace_kernels.{prompts}:mla_prefill"}
