"""Experts in INT4, as Kimi K2 Thinking is published: a reduced one against transformers with what INT4 left of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_kernels.fp8 import Fp8, quant_blocks
from millrace_serve.model.checkpoint.shapes import check_headers, tensor_bytes, weight_bytes
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import kept_forms, plain, unpack_int4
from millrace_serve.model.weights import Checkpoint, CheckpointError, Part
from millrace_testing.examples import examples
from millrace_testing.int4 import pack, rounded, write_int4
from millrace_testing.reference import Reference, random_reference
from model.checkpoints import Tensors, tensors_of, variant
from model.harness import Driver, Seq, random_prompt
from model.test_family import CPU, MEMBERS, MLA, REDUCED, VOCAB, check_answers

PUBLISHED = {
    **REDUCED, **MLA, **MEMBERS["kimi-k2"], "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "n_routed_experts": 24,  # of 384, which test_family.py has
}  # fmt: skip
GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"
DOWN = GATE.replace("gate_proj", "down_proj")


@dataclass
class Thinking:
    hf: Reference  # with the weights that INT4 left
    folder: Path  # in shards
    model: DeepseekV3


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Thinking:
    hf, folder = random_reference({**PUBLISHED, "model_type": "deepseek_v3"}), tmp_path_factory.mktemp("k2-thinking")
    hf.save_pretrained(folder / "bf16", max_shard_size="4MB")
    (folder / "bf16" / "config.json").write_text(json.dumps(PUBLISHED))
    written = write_int4(folder / "int4", folder / "bf16")
    for name, param in hf.state_dict().items():  # transformers keeps the experts of a layer in one tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            param.copy_(torch.stack([rounded(expert) for expert in param]))
    return Thinking(hf, written, load(written))


def load(path: Path, dims: ParallelDims | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return load_model(path, dims or ParallelDims(), CPU, dtype, **options)


@examples(25)
@given(
    st.lists(st.integers(-8, 7), min_size=64, max_size=64), st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=2)
)
def test_every_value_comes_back(values: list[int], scales: list[float]) -> None:
    whole, by_group = torch.tensor(values), torch.tensor(scales)
    for rows in (1, 2):
        found = unpack_int4(pack(whole.view(rows, -1)), by_group.view(rows, -1))
        assert torch.equal(found, (whole * by_group.repeat_interleave(32)).view(rows, -1))


def test_first_value_in_the_lowest_bits() -> None:
    assert pack(torch.tensor([[-8, -7, -6, -5, 0, 1, 6, 7]])).tolist() == [[0xFE983210 - (1 << 32)]]


@torch.no_grad()
def test_logits_and_greedy_tokens(thinking: Thinking) -> None:
    check_answers(Driver(thinking.model), lambda tokens: thinking.hf(torch.tensor([tokens])).logits[0])


def test_parts_of_ranks(thinking: Thinking) -> None:
    """Also those that begin inside of a group."""
    ckpt = Checkpoint(thinking.folder, ModelConfig.load(thinking.folder), CPU, torch.float32)
    for name, shape in ((GATE, (32, 128)), (DOWN, (128, 32))):
        whole = ckpt.tensor(name, shape)
        for part in (Part(rows=(16, 32)), Part(cols=(16, 32)), Part((8, 24), (0, 16))):
            (r0, r1), (c0, c1) = part.of(shape)
            assert torch.equal(ckpt.tensor(name, shape, part), whole[r0:r1, c0:c1])
            assert torch.equal(ckpt.stack([[name]], shape, part), whole[None, r0:r1, c0:c1])
    experts = [load(thinking.folder, ParallelDims(rank=rank, dp=2)).layers[1].mlp.routed.held.w13 for rank in (0, 1)]
    assert torch.equal(torch.cat(experts), thinking.model.layers[1].mlp.routed.held.w13)


@pytest.mark.parametrize("keep", [False, True])
def test_parts_of_experts_on_tensor_parallel_ranks(keep: bool, thinking: Thinking) -> None:
    """Half a group wide. No block of FP8 is whole, so both products of an expert are plain."""
    whole = thinking.model.layers[1].mlp.routed.held
    dims = [ParallelDims(rank=rank, tp=2, expert_tp=True) for rank in (0, 1)]
    parts = [load(thinking.folder, of_rank, keep_quantised=keep).layers[1].mlp.routed.held for of_rank in dims]
    gates, ups = zip(*(part.w13.chunk(2, 1) for part in parts), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], 1), whole.w13)
    assert torch.equal(torch.cat([part.w2 for part in parts], 2), whole.w2)


def test_what_the_forms_change() -> None:
    """The figures of docs/reference/models.md: relative norms of products with normal values."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 2048, generator=generator) for rows in (512, 64))
    packed = rounded(weight)
    fp8 = plain(quant_blocks(packed), torch.float32)
    for found, expected, least, most in (
        (packed, weight, 0.093, 0.097),
        (fp8, packed, 0.025, 0.028),
        (packed.bfloat16().float(), packed, 0.001, 0.002),
    ):
        assert least < float((x @ (found - expected).T).norm() / (x @ expected.T).norm()) < most


def test_gpu_keeps_experts_in_fp8_and_the_rest_plain(tmp_path: Path) -> None:
    """With experts of whole blocks. The plan of memory, and the check of headers, say the same."""
    wide = {**PUBLISHED, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_hidden_layers": 2}
    random_reference({**wide, "model_type": "deepseek_v3"}).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(wide))
    folder = write_int4(tmp_path / "int4", tmp_path / "plain")
    model, config = load(folder, dtype=torch.bfloat16, keep_quantised=True), ModelConfig.load(folder)
    dense, moe = (layer.mlp for layer in model.layers)
    assert isinstance(moe, Moe) and isinstance(moe.routed.held.w13, Fp8) and isinstance(moe.routed.held.w2, Fp8)
    plain_ones = (model.layers[1].self_attn.o_proj, moe.shared_experts.gate_up_proj, dense.mlp.gate_up_proj)
    assert {one.dtype for one in plain_ones} == {torch.bfloat16}
    for dims in (ParallelDims(), ParallelDims(rank=1, dp=2)):
        rank = load(folder, dims, torch.bfloat16, keep_quantised=True)
        assert weight_bytes(config, dims, torch.bfloat16, kept_forms(config, True)) == tensor_bytes(rank)
    check_headers(folder)
    exact = rounded(tensors_of(tmp_path / "plain")[DOWN])
    error = (plain(Fp8(*(part[0] for part in moe.routed.held.w2)), torch.float32) - exact).norm() / exact.norm()
    assert 0 < error < 0.04, "what E4M3 rounds"
    prompt = random_prompt(40, VOCAB, 1)
    models = (load(folder, keep_quantised=True), load(folder))
    found, expected = (Driver(one).step([(Seq(list(prompt)), 40)]) for one in models)
    assert 0 < float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median()) < 0.2


@pytest.mark.parametrize("lost", ["_packed", "_scale", "_shape"])
def test_missing_tensors_are_named(lost: str, thinking: Thinking, tmp_path: Path) -> None:
    folder = variant(thinking.folder, tmp_path / "bad", lambda tensors: tensors.pop(DOWN + lost))
    with pytest.raises(CheckpointError, match=f"{DOWN}{lost} is missing"):
        check_headers(folder)


def test_tensors_of_another_shape_are_named(thinking: Thinking, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}_scale"] = tensors[f"{DOWN}_scale"].repeat(1, 2)

    with pytest.raises(CheckpointError, match=rf"{DOWN}_scale has shape \[128, 2\], expected \[128, 1\]"):
        load(variant(thinking.folder, tmp_path / "bad", change))
