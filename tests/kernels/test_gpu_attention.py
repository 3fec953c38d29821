"""Every implementation in the table of attention's ops on a GPU, over DeepSeek-V3's widths, against the references on
the same GPU. Implementations whose library is missing are not in the table.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cases import DECODE_CASES, PREFILL_CASES, DecodeCase, PrefillCase
from kernels.graphs import captured
from millrace_kernels import backend, mla_decode, mla_prefill
from millrace_kernels import mla_absorb as absorption
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, dequantised, rms_error
from millrace_kernels.triton import mla_absorb
from millrace_testing.like_reference import assert_like_reference
from millrace_testing.tolerances import (
    ATTENTION_TOLERANCE,
    FP8_ATTENTION_TOLERANCE,
    LSE_TOLERANCE,
    OP_TOLERANCE,
    assert_close,
)

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = [0, 1, 7, SMALL_TOKENS, SMALL_TOKENS + 1, 64, 128, 4096]
HEADS = [2, 16, 128]
DEVICE = torch.device("cuda")
PRODUCTS = ("absorb_q", attention_inputs.absorb_q, "w_uk"), ("project_v", attention_inputs.project_v, "w_uv")
# Where rounding to BF16 first turned a tie, E4M3 values are one step apart; float32 are such rows dequantised.
EXACT = OP_TOLERANCE | {torch.float32: 2**-3, E4M3: 2**-3}
ATTENTION = ATTENTION_TOLERANCE | {torch.float32: LSE_TOLERANCE}
LONG_PREFILL = PrefillCase("long", (1500, 1, 700), (4096, 0, 100))
LONG_DECODE = (
    DecodeCase("many", 1, (4096,) * 16 + (1,) * 100),
    DecodeCase("one-long", 1, (32768,)),
    DecodeCase("two-queries", 2, tuple(range(2, 2000, 61))),
    DecodeCase("short-chunks", 64, (64, 65, 129, 190, 0)),
    DecodeCase("chunks", 130, (151, 700, 146, 182, 0)),  # FlashMLA is wrong about more than 64 over an E4M3 pool
)
by_name = {"ids": lambda case: case.name}


def check(
    op: str,
    size: int,
    make: Callable[..., Any],
    *shape: Any,
    tolerances: dict[torch.dtype, float] = EXACT,
    changed: tuple[str, ...] = (),
) -> None:
    """All implementations that serve the size; make(Draw, *shape) are the op's inputs."""

    def inputs() -> dict[str, Any]:
        return make(Draw("cuda", BF16), *shape)

    targets = [c.target for c in backend.choices(op, DEVICE) if c.min_size <= size <= c.max_size]
    assert targets or backend.capability(DEVICE) != "sm90", f"nothing in the table for {op}"
    for target in targets:
        assert_like_reference(op, target, inputs, tolerances, changed)


def reference(op: str, inputs: dict[str, Any]) -> torch.Tensor:
    with backend.forced(**{f"mla_absorb.{op}": ""}):
        found: torch.Tensor = getattr(absorption, op)(**inputs)
    return found


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("heads", HEADS)
def test_layout_and_rotation(num: int, heads: int) -> None:
    check("mla_expand.rope_q", num, attention_inputs.rope_q, num, heads, changed=("q",))
    check("mla_expand.expand_kv", num, attention_inputs.expand_kv, num, heads)
    check("merge_state.merge_state", num, attention_inputs.merge_state, num, heads, tolerances=ATTENTION)


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("heads", HEADS)
def test_absorption(num: int, heads: int) -> None:
    check("mla_absorb.absorb_q", num, attention_inputs.absorb_q, num, heads)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_our_products_of_the_absorbed_form_for_many_tokens(tokens: int, fp8: bool) -> None:
    draw, tile = Draw("cuda", BF16), mla_absorb.Tile(128, 8, tokens)
    for op, make, weight in PRODUCTS:
        inputs = make(draw, 100, 128)
        quantised = attention_inputs.fp8_heads(inputs[weight])
        values = quantised.data.float() * quantised.scales.repeat_interleave(128, 1)[:, None]
        given = inputs | {weight: quantised} if fp8 else inputs
        widened = inputs | {weight: values if fp8 else inputs[weight].float()}
        rows = "q" if op == "absorb_q" else "latent"
        wanted = reference(op, widened | {rows: inputs[rows].float()})
        if op == "absorb_q":
            assert_close(mla_absorb.absorb_q_with(**given, tile=tile), wanted)
        else:
            operand = mla_absorb.project_v_quant_with(**given, tile=tile)
            assert operand.fp8 is not None and rms_error(dequantised(operand.fp8), wanted) < FP8_TOLERANCE


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num", [17, 100, 200, 256])
def test_either_form_of_a_weight(num: int, heads: int) -> None:
    """The table takes the FP8 form or the plain one; they are the same numbers, but for BF16's rounding."""
    draw = Draw("cuda", BF16)
    for op, make, weight in PRODUCTS:
        inputs = make(draw, num, heads)
        quantised = attention_inputs.fp8_heads(inputs[weight])
        values = quantised.data.float() * quantised.scales.repeat_interleave(128, 1)[:, None]
        rows = "q" if op == "absorb_q" else "latent"
        wanted = reference(op, inputs | {weight: values, rows: inputs[rows].float()})
        given = inputs | {weight: values.to(BF16), "quantised": quantised}
        if op == "absorb_q":
            assert_close(absorption.absorb_q(**given), wanted)
        else:
            operand = absorption.project_v_quant(**given)
            assert operand.fp8 is not None and rms_error(dequantised(operand.fp8), wanted) < FP8_TOLERANCE


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize(("q_width", "normed"), [(1536, True), (128, True), (3072, False)])
def test_mla_qkv_norm(num: int, kv_dtype: torch.dtype, q_width: int, normed: bool) -> None:
    args = (num, q_width, normed, kv_dtype)
    check("mla_qkv.mla_qkv_norm", num, attention_inputs.mla_qkv_norm, *args, changed=("kv",))


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_kv_gather(kv_dtype: torch.dtype) -> None:
    for starts, lens in (((), ()), ((0, 0), (0, 0)), ((64, 0, 128), (36, 129, 1)), ((0, 4096), (4096, 3))):
        check("kv_gather.kv_gather", sum(lens), attention_inputs.kv_gather, starts, lens, kv_dtype)


@pytest.mark.parametrize("case", [*PREFILL_CASES, LONG_PREFILL], **by_name)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [True, False])
def test_mla_prefill(case: PrefillCase, heads: int, causal: bool) -> None:
    args = (case.q_lens, case.q_lens if causal else case.prefix_lens, heads, causal)
    size = sum(case.q_lens)
    check("mla_prefill.mla_prefill", size, attention_inputs.mla_prefill, *args, tolerances=ATTENTION)


def test_plans_of_one_step_live_side_by_side() -> None:
    """Those of the own tokens and of the prefix, and those of a step before that the GPU may still work on."""
    draw = Draw("cuda", BF16)
    lens = [((100, 7), (100, 7), True), ((100, 7), (640, 64), False), ((3, 300), (3, 300), True)]
    calls = [attention_inputs.mla_prefill(draw, q, k, 16, causal) for q, k, causal in lens]
    expected = [mla_prefill.mla_prefill(**call) for call in calls]
    for _ in range(20):
        heads = mla_prefill.Heads(16, attention_inputs.QK, attention_inputs.VALUE)
        plans = [mla_prefill.plan(q, k, heads, causal, DEVICE, BF16) for q, k, causal in lens]
        for _layer, (call, plan, (out, lse)) in itertools.product(range(3), zip(calls, plans, expected, strict=True)):
            found = mla_prefill.mla_prefill(**call, plan=plan)
            assert torch.equal(found[0], out) and torch.equal(found[1], lse)


@pytest.mark.parametrize("case", [*DECODE_CASES, *LONG_DECODE], **by_name)
@pytest.mark.parametrize("heads", HEADS)
def test_mla_decode(case: DecodeCase, heads: int) -> None:
    """Queries that see nothing have an lse of either sign, so only the others' are compared."""
    op, draw = "mla_decode.mla_decode", Draw("cuda", BF16)
    call = attention_inputs.mla_decode(draw, case.seq_lens, case.num_queries, heads, BF16)
    with backend.forced(**{op: ""}):
        wide = call | {"q": call["q"].float(), "kv": call["kv"].float()}
        wanted, wanted_lse = mla_decode.mla_decode(**wide)
    plan = mla_decode.plan(call["seq_lens"], case.num_queries, heads, BF16)
    seen = wanted_lse.isfinite()
    for choice in backend.choices(op, DEVICE):
        for given in (plan, None):
            with backend.forced(**{op: choice.target}):
                out, lse = mla_decode.mla_decode(**call, plan=given)
            assert_close(out, wanted, ATTENTION[BF16])
            assert_close(lse[seen], wanted_lse[seen], LSE_TOLERANCE)
            assert lse[~seen].isinf().all()


@pytest.mark.parametrize("case", [*DECODE_CASES, *LONG_DECODE], **by_name)
def test_mla_decode_over_an_fp8_pool(case: DecodeCase) -> None:
    """A sequence of length 0 may have any output, but nobody else's changes."""
    op, draw = "mla_decode.mla_decode", Draw("cuda", BF16)
    call = attention_inputs.mla_decode(draw, case.seq_lens, case.num_queries, 128, E4M3)
    with backend.forced(**{op: ""}):
        wanted, _ = mla_decode.mla_decode(**(call | {"q": call["q"].float()}))
    plan = mla_decode.plan(call["seq_lens"], case.num_queries, 128, E4M3)
    real = call["seq_lens"] > 0
    for choice in backend.choices(op, DEVICE):
        with backend.forced(**{op: choice.target}):
            out, _ = mla_decode.mla_decode(**call, plan=plan)
        assert_close(out[real], wanted[real], FP8_ATTENTION_TOLERANCE)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_graph_replays_with_other_lengths(kv_dtype: torch.dtype) -> None:
    """The plan and all ops of a decode step are captured once; lengths, pages and slots change under it."""
    draw, lens = Draw("cuda", BF16), (4096, 1, 700, 64, 65, 2000)
    call = attention_inputs.mla_decode(draw, lens, 1, 16, kv_dtype)
    w_uk, cos_sin = draw(16, attention_inputs.NOPE, attention_inputs.LATENT), draw.angles(len(lens))
    query = draw(len(lens), 16, attention_inputs.QK)

    def step() -> torch.Tensor:
        from millrace_kernels.mla_absorb import absorb_q, project_v

        plan = mla_decode.plan(call["seq_lens"], 1, 16, kv_dtype)
        q = absorb_q(query, w_uk, **cos_sin).unsqueeze(1)
        latent, _ = mla_decode.mla_decode(**(call | {"q": q}), plan=plan)
        return project_v(latent.squeeze(1), w_uk)

    graph, found = captured(step)
    for shorter in (0, 1, 30):
        call["seq_lens"].copy_(torch.tensor([max(n - shorter, 1) for n in lens], dtype=torch.int32))
        query.normal_(generator=draw.generator)
        graph.replay()
        assert torch.equal(found, step())
