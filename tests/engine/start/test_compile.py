"""torch.compile of decode steps: our ops are not traced, and the answers stay."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine.harness import request, said
from millrace_kernels.rms_norm import rms_norm
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.start import startup
from millrace_serve.engine.start.compile import announce_kernels, compiled
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY
from millrace_testing.tolerances import LOGPROB_TOLERANCE
from torch import Tensor
from torch._dynamo.utils import counters

CPU = torch.device("cpu")


def engine(**execution: object) -> Engine:
    limits = Limits(num_pages=32, max_model_len=256, max_running=4, max_prefill_tokens=80, checks=("canary",))
    options = Execution.model_validate(execution)
    return load_rank(limits, Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32, execution=options).engine()


@pytest.mark.long
def test_compiled_steps_say_what_plain_ones_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `eager` shows what is traced, without a compiler for it."""
    torch.set_num_threads(1)
    seen: list[int] = []

    def recording(forward: object) -> object:
        fast = compiled(forward, "eager")  # type: ignore[arg-type]
        return lambda inputs: (seen.append(len(inputs.token_ids)), fast(inputs))[1]

    monkeypatch.setattr(startup, "compiled", recording)
    batch = [request(room, list(range(20, 60 + room)), max_tokens=6, logprobs=0) for room in range(4)]
    plain = said(engine(), batch)
    torch._dynamo.reset()
    counters.clear()
    fast = said(engine(graphs=(1, 2), compile_max_batch=2), batch)
    assert set(seen) == {1, 2}, "buckets up to compile_max_batch"
    assert counters["stats"]["calls_captured"] > 0
    for room, answer in plain.items():
        assert [token for token, _ in fast[room]] == [token for token, _ in answer]
        assert [p for _, p in fast[room]] == pytest.approx([p for _, p in answer], abs=LOGPROB_TOLERANCE)


@pytest.mark.long
def test_inductor_goes_around_our_ops() -> None:
    torch._dynamo.reset()
    counters.clear()
    weight = torch.full((64,), 2.0)

    def forward(x: Tensor) -> Tensor:
        operand, _ = rms_norm((x * 3 + 1).relu(), None, weight, 1e-6)
        return operand.plain * 2 - 1

    x = torch.randn(3, 64)
    found = functools.reduce(lambda _, run: run(x), [compiled(forward)] * 2, x)  # type: ignore[arg-type]
    torch.testing.assert_close(found, forward(x))
    assert counters["stats"]["unique_graphs"] == 2, "what comes before the op, and what comes after it"


def test_compilation_of_a_kernel_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails. Triton takes the function from this module when it meets a kernel first."""
    compiler = pytest.importorskip("triton.compiler")
    progress, doing = Progress(), []

    def compile_kernel(source: str, *, target: str) -> None:
        doing.append((progress.doing, source, target))
        raise ValueError

    monkeypatch.setattr(compiler, "compile", compile_kernel)
    announce_kernels(progress.busy)
    with pytest.raises(ValueError):
        compiler.compile("a kernel", target="a GPU")
    assert doing == [("the compilation of a kernel", "a kernel", "a GPU")] and progress.doing == ""
    jit = importlib.import_module("triton.runtime.jit")
    assert "import CompiledKernel, compile" in inspect.getsource(jit.JITFunction.create_binder)


def test_first_step_of_each_size_on_a_gpu_is_announced() -> None:
    announced: list[str] = []

    @contextlib.contextmanager
    def announce(what: str) -> Iterator[None]:
        announced.append(what)
        yield

    runner = TorchRunner.__new__(TorchRunner)
    runner._announce, runner._met = announce, set()
    batch = StepBatch.idle()
    for device, expected in (("cpu", 0), ("cuda", 1), ("cuda", 1)):
        runner._device = SimpleNamespace(torch=torch.device(device))  # type: ignore[assignment]
        with runner._compiling(batch):
            assert len(announced) == expected
    for rows, expected in ((1, 2), (64, 2), (65, 3)):
        with runner._compiling(replace(batch, dp_num_tokens=(0, rows))):
            assert len(announced) == expected
