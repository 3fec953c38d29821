"""A step whose last MLP runs on the sampled rows alone: their hidden states and the pool are those of all rows."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from millrace_kernels.fp8 import Operand
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import PLAIN
from millrace_testing.checkpoint import CONFIG
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from torch import Tensor


@pytest.fixture(scope="module")
def model(random_bf16: Path) -> DeepseekV3:
    return load_model(random_bf16, ParallelDims(), torch.device("cpu"), torch.float32)


def sampled_only(model: DeepseekV3) -> DeepseekV3:
    """The same model as it is without an MTP layer."""
    short = copy.copy(model)
    short.layers = [*model.layers[:-1], copy.copy(model.layers[-1])]
    short.layers[-1].sampled_only = True
    return short


@pytest.fixture
def widths(model: DeepseekV3, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the last MLP was given, call by call."""
    seen: list[int] = []
    mlp = model.layers[-1].mlp

    def spy(h: Operand, inputs: ForwardInput) -> Tensor:
        assert h.plain is not None
        seen.append(len(h.plain))
        return mlp(h, inputs)

    monkeypatch.setattr(model.layers[-1], "mlp", spy)
    return seen


# (cached tokens, new tokens) of each sequence, and which of them, decode sequences first, are sampled
STEPS = {
    "one prompt": ([(0, 70)], [0]),
    "prompts": ([(0, 70), (0, 1), (0, 130)], [0, 1, 2]),
    "chunks and decode rows": ([(64, 1), (65, 1), (0, 30), (66, 100), (3, 5)], [0, 1, 3]),
    "no sampled row": ([(0, 20), (70, 66)], []),
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", STEPS)
def test_sampled_rows(model: DeepseekV3, widths: list[int], name: str, padding: int) -> None:
    lens, sampled = STEPS[name]
    driver = Driver(model)
    seqs = [Seq(random_prompt(cached + new, model.config.vocab_size, i)) for i, (cached, new) in enumerate(lens)]
    before = [(seq, cached) for seq, (cached, _) in zip(seqs, lens, strict=True) if cached]
    if before:
        driver.step(before)
    inputs = driver.build([(seq, new) for seq, (_, new) in zip(seqs, lens, strict=True)], padding)
    inputs = replace(inputs, sample_rows=inputs.sample_rows[sampled])
    pool = driver.kv.clone()
    expected = model.forward(inputs, pool)[inputs.sample_rows]
    found = sampled_only(model).forward(inputs, driver.kv)[inputs.sample_rows]
    assert widths[-2:] == [len(inputs.token_ids), len(sampled)]
    assert found.shape == expected.shape
    assert_close(found, expected, MODEL_TOLERANCE)
    torch.testing.assert_close(driver.kv, pool, rtol=0.0, atol=0.0, equal_nan=True)


def test_rows_within_a_prompt(model: DeepseekV3, widths: list[int]) -> None:
    """Each attends to what lies before it, and nothing after it."""
    driver, seqs = Driver(model), [Seq(random_prompt(num, model.config.vocab_size, num)) for num in (90, 40)]
    inputs = replace(driver.build([(seqs[0], 90), (seqs[1], 40)]), sample_rows=torch.tensor([0, 63, 64, 90, 129]))
    assert_close(
        sampled_only(model).forward(inputs, driver.kv)[inputs.sample_rows],
        model.forward(inputs, driver.kv)[inputs.sample_rows],
        MODEL_TOLERANCE,
    )
    assert widths == [5, 130]


@pytest.mark.parametrize("dense", [0, 1])
def test_first_layer_may_be_the_last(dense: int) -> None:
    """And its queries may come from the hidden state itself, as a view of a wider product."""
    config = ModelConfig.parse({**CONFIG, "num_hidden_layers": 1, "first_k_dense_replace": dense, "q_lora_rank": None})
    weights = RandomWeights(torch.device("cpu"), torch.float32, PLAIN)
    model = DeepseekV3(weights, config, ParallelDims())
    assert model.layers[-1].sampled_only is (model.mtp is None)
    driver, seqs = Driver(model), [Seq(random_prompt(70, config.vocab_size, i)) for i in range(3)]
    driver.step([(seqs[0], 69), (seqs[1], 64)])
    inputs = driver.build([(seqs[0], 1), (seqs[1], 2), (seqs[2], 1)])  # decode, a chunk, a prompt of one token
    inputs = replace(inputs, sample_rows=torch.tensor([3, 0, 1, 1]))
    expected = model.forward(inputs, driver.kv)[inputs.sample_rows]
    assert_close(sampled_only(model).forward(inputs, driver.kv)[inputs.sample_rows], expected, MODEL_TOLERANCE)


def test_decode_step_computes_every_row(model: DeepseekV3, widths: list[int]) -> None:
    driver, seq = Driver(model), Seq(random_prompt(40, model.config.vocab_size, 0))
    driver.step([(seq, 39)])
    decode = driver.build([(seq, 1)], padding=3)
    assert torch.equal(sampled_only(model).forward(decode, driver.kv), model.forward(decode, driver.kv))
    assert widths[1:] == [4, 4]


def test_replicas_and_an_mtp_layer_need_every_row() -> None:
    """The other replicas have been told how many rows come, and MTP reads the hidden state of every prompt token."""
    weights = RandomWeights(torch.device("cpu"), torch.float32, PLAIN)

    def flag(mtp: int, dims: ParallelDims) -> bool:
        config = ModelConfig.parse({**CONFIG, "num_nextn_predict_layers": mtp})
        return DeepseekV3(weights, config, dims).layers[-1].sampled_only

    assert [flag(0, ParallelDims()), flag(1, ParallelDims()), flag(0, ParallelDims(dp=2))] == [True, False, False]
