"""Attention's Triton kernels against the references, on a CPU through Triton's interpreter."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cases import DECODE_CASES, PREFILL_CASES, DecodeCase, PrefillCase
from millrace_kernels import mla_absorb as reference
from millrace_kernels.backend import SMALL_TOKENS, forced
from millrace_kernels.fp8 import Fp8, quant_groups
from millrace_kernels.mla_qkv import mla_qkv_norm
from millrace_kernels.page_sum import page_sums
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, dequantised, rms_error
from millrace_kernels.triton import mla_absorb, mla_decode
from millrace_kernels.triton.mla_absorb import Tile, absorb_q_with, project_v_quant_with
from millrace_testing.like_reference import assert_like_reference
from millrace_testing.tolerances import ATTENTION_TOLERANCE, OP_TOLERANCE, assert_close
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU test_gpu_attention.py runs the kernels")

E4M3 = torch.float8_e4m3fn
HEADS = 3  # no power of two
EXACT = OP_TOLERANCE | {E4M3: 0.0}


def check(
    op: str,
    target: str,
    make: Callable[..., Any],
    *shape: Any,
    tolerances: dict[torch.dtype, float] = EXACT,
    dtype: torch.dtype = torch.float32,
    changed: tuple[str, ...] = (),
) -> None:
    """make(Draw, *shape) are the op's inputs."""

    def inputs() -> dict[str, Any]:
        return make(Draw(dtype=dtype), *shape)

    assert_like_reference(op, f"millrace_kernels.triton.{target}", inputs, tolerances, changed)


@pytest.mark.parametrize(("num", "heads"), [(0, 2), (1, 20), (7, 1), (7, 20)])
def test_rope_q_leaves_the_other_columns(num: int, heads: int) -> None:
    check("mla_expand.rope_q", "mla_expand:rope_q", attention_inputs.rope_q, num, heads, changed=("q",))


@pytest.mark.parametrize(
    ("num", "q_width", "kv_dtype"),
    [(0, 200, E4M3), (1, 1536, torch.float32), (SMALL_TOKENS, 200, torch.bfloat16), (SMALL_TOKENS + 1, 1536, E4M3),
     (SMALL_TOKENS + 1, 200, torch.float32), (1, 200, E4M3)],
)  # fmt: skip
def test_mla_qkv_norm(num: int, q_width: int, kv_dtype: torch.dtype) -> None:
    make = attention_inputs.mla_qkv_norm
    tolerances = EXACT | {torch.bfloat16: 2**-8, E4M3: 2**-4}  # a tie that float32 turned
    args = (num, q_width, True, kv_dtype)
    check("mla_qkv.mla_qkv_norm", "mla_qkv:mla_qkv_norm", make, *args, tolerances=tolerances, changed=("kv",))


@pytest.mark.parametrize("target", ["millrace_kernels.triton.mla_qkv:mla_qkv_norm", ""])
@pytest.mark.parametrize("num", [0, SMALL_TOKENS, SMALL_TOKENS + 1])
def test_mla_qkv_norm_without_a_plain_q(num: int, target: str) -> None:
    results = []
    for plain in (True, False):
        call = attention_inputs.mla_qkv_norm(Draw(dtype=torch.bfloat16), num, 256, True, torch.bfloat16)
        with forced(**{"mla_qkv.mla_qkv_norm": target}):
            results.append((*mla_qkv_norm(**call, plain=plain), call["kv"]))
    (whole, *rest), (alone, *same) = results
    assert (alone.plain is None) == (alone.fp8 is not None) == (num > SMALL_TOKENS)
    found, expected = alone.fp8 or (alone.plain,), whole.fp8 or (whole.plain,)
    for tensor, wanted in zip((*found, *same), (*expected, *rest), strict=True):
        torch.testing.assert_close(tensor.float(), wanted.float(), rtol=0.0, atol=0.0, equal_nan=True)


def test_mla_qkv_norm_passes_q_through() -> None:
    args = (SMALL_TOKENS + 1, 384, False, torch.float32)
    check("mla_qkv.mla_qkv_norm", "mla_qkv:mla_qkv_norm", attention_inputs.mla_qkv_norm, *args, changed=("kv",))


@pytest.mark.parametrize("target", ["millrace_kernels.triton.mla_qkv:mla_qkv_norm", ""])
def test_cached_value_beyond_e4m3_is_its_largest(target: str) -> None:
    call = attention_inputs.mla_qkv_norm(Draw(dtype=torch.bfloat16), 3, 200, True, E4M3)
    call["kv_weight"] = call["kv_weight"].abs() * 1e4 + 1e4
    with forced(**{"mla_qkv.mla_qkv_norm": target}):
        _, c_kv, _ = mla_qkv_norm(**call)
    kv, slots = call["kv"], call["slots"]
    stored = kv[slots // kv.shape[1], slots % kv.shape[1], : c_kv.shape[1]].float()
    beyond = c_kv.abs() > 500
    assert beyond.float().mean() > 0.5
    assert torch.equal(stored[beyond], 448.0 * c_kv[beyond].float().sign())


@pytest.mark.parametrize(
    ("num", "target"), [(0, "absorb_q"), (7, "absorb_q"), (1, "absorb_q_small"), (SMALL_TOKENS, "absorb_q_small")]
)
def test_absorb_q(target: str, num: int) -> None:
    check("mla_absorb.absorb_q", f"mla_absorb:{target}", attention_inputs.absorb_q, num, HEADS)


@pytest.mark.parametrize(("num", "fp8"), [(0, True), (17, False), (40, True)])
def test_absorption_of_many_tokens(num: int, fp8: bool) -> None:
    draw = Draw(dtype=torch.bfloat16)
    inputs, tile = attention_inputs.absorb_q(draw, num, HEADS), Tile(64, 4, 32)
    weight, values = of_heads(inputs["w_uk"], fp8)
    found = absorb_q_with(**(inputs | {"w_uk": weight}), tile=tile)
    wanted = reference.absorb_q(inputs["q"].float(), values, inputs["cos"], inputs["sin"])
    assert_close(found, wanted)
    inputs = attention_inputs.project_v(draw, num, HEADS)
    weight, values = of_heads(inputs["w_uv"], fp8)
    latent, wanted = inputs["latent"], reference.project_v(inputs["latent"].float(), values)
    quantised = project_v_quant_with(latent, weight, Tile(128, 4, 32)).fp8
    assert quantised is not None and quantised.scales.stride(0) == 1
    assert rms_error(dequantised(quantised), wanted) < FP8_TOLERANCE
    assert rms_error(dequantised(quantised), dequantised(quant_groups(wanted.to(latent.dtype)))) < 5e-3


def test_fp8_weights_are_read_where_there_are_any() -> None:
    """The plain ones are NaN then."""
    draw = Draw(dtype=torch.bfloat16)
    for op, weight, run in (
        ("absorb_q", "w_uk", mla_absorb.absorb_q_many),
        ("project_v", "w_uv", mla_absorb.project_v_quant),
    ):
        inputs = getattr(attention_inputs, op)(draw, 17, HEADS)
        quantised, values = of_heads(inputs[weight], True)
        wanted = getattr(reference, op)(**{name: x.float() for name, x in (inputs | {weight: values}).items()})
        found = run(**(inputs | {weight: torch.full_like(inputs[weight], torch.nan)}), quantised=quantised)
        found = found if isinstance(found, torch.Tensor) else dequantised(found.fp8)
        assert rms_error(found.float(), wanted) < FP8_TOLERANCE
    for table, measured in (
        (mla_absorb.ABSORB, mla_absorb.absorb_is_measured),
        (mla_absorb.PROJECT_QUANT, mla_absorb.project_quant_is_measured),
    ):
        for num_tokens, heads, size in table.rows:
            assert measured(num_tokens, (heads, 128, 512, size)) and not measured(num_tokens, (heads, 128, 512, 4))
            others = (64, 512), (128, 32)  # their tiles would not cover these widths
            assert not any(measured(num_tokens, (heads, *widths, size)) for widths in others)


def of_heads(weight: Tensor, fp8: bool) -> tuple[Tensor | Fp8, Tensor]:
    """What the kernels get, and its exact values."""
    if not fp8:
        return weight, weight.float()
    quantised = attention_inputs.fp8_heads(weight)
    return quantised, quantised.data.float() * quantised.scales.repeat_interleave(128, 1)[:, None]


@pytest.mark.parametrize("heads", [16, 128])
def test_few_tokens_fill_the_gpu_and_cover_all_columns(heads: int) -> None:
    block = mla_absorb.columns(heads, 512)
    assert 512 % block == 0 and block >= mla_absorb.LEAST_COLUMNS
    assert block == mla_absorb.LEAST_COLUMNS or heads * 512 // block >= 2 * 132


@pytest.mark.parametrize("num", [0, 1, 7])
def test_expand_kv(num: int) -> None:
    check("mla_expand.expand_kv", "mla_expand:expand_kv", attention_inputs.expand_kv, num, HEADS)


@pytest.mark.parametrize("num", [0, 1, 7])
def test_merge_state(num: int) -> None:
    check("merge_state.merge_state", "merge_state:merge_state", attention_inputs.merge_state, num, HEADS)


@pytest.mark.parametrize(
    ("starts", "lens", "kv_dtype"),
    [
        ((), (), torch.float32),
        ((0, 0, 0), (65, 10, 64), torch.bfloat16),
        ((0, 64, 0), (65, 0, 3), E4M3),
        ((64, 0, 128), (36, 129, 1), torch.float32),
        ((64, 0, 128), (36, 129, 1), E4M3),
        ((0, 0, 0), (0, 0, 0), torch.bfloat16),
    ],
)
def test_kv_gather(starts: tuple[int, ...], lens: tuple[int, ...], kv_dtype: torch.dtype) -> None:
    check("kv_gather.kv_gather", "kv_gather:kv_gather", attention_inputs.kv_gather, starts, lens, kv_dtype)


@pytest.mark.parametrize("num_words", [1, 4097, 33_000])
@pytest.mark.parametrize("pages", [[], [2], [1, 0, 1]])
def test_page_sums(pages: list[int], num_words: int) -> None:
    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    pool = torch.randint(low, high, (3, num_words + 16), dtype=torch.int32)
    wanted = page_sums(pool, numbers := torch.tensor(pages, dtype=torch.int64), num_words)
    with forced(**{"page_sum.page_sums": "millrace_kernels.triton.page_sum:page_sums"}):
        assert torch.equal(page_sums(pool, numbers, num_words), wanted)


SHORT_PREFILL = [
    *((case, True) for case in PREFILL_CASES[:2]),
    (PrefillCase("ragged", (7, 64, 1), (0, 0, 0)), True),
    (PrefillCase("ragged", (7, 64, 1), (0, 0, 0)), False),
    (PrefillCase("across-blocks", (129, 5), (0, 0)), True),
    (PREFILL_CASES[4], False),
]


@pytest.mark.parametrize(("case", "causal"), SHORT_PREFILL, ids=str)
def test_mla_prefill(case: PrefillCase, causal: bool) -> None:
    args = (case.q_lens, case.q_lens if causal else case.prefix_lens, 1, causal)
    name = "mla_prefill.mla_prefill"
    check(name, "mla_prefill:mla_prefill", attention_inputs.mla_prefill, *args, tolerances=ATTENTION_TOLERANCE)


SHORT = (*DECODE_CASES[:-1], DecodeCase("long-and-short", 1, (700, 5)))  # a chunk takes the interpreter long


@pytest.mark.parametrize(("case", "sms"), [*((case, 6) for case in SHORT), (SHORT[2], 0), (SHORT[4], 0)], ids=str)
def test_mla_decode(case: DecodeCase, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_decode, "sms", lambda: sms)
    make = functools.partial(attention_inputs.mla_decode, kv_dtype=torch.float32)
    args = (case.seq_lens, case.num_queries, HEADS)
    check("mla_decode.mla_decode", "mla_decode:mla_decode", make, *args, tolerances=ATTENTION_TOLERANCE)


def test_mla_decode_over_an_fp8_pool() -> None:
    args = ((70, 0, 5), 2, HEADS, E4M3)
    check(
        "mla_decode.mla_decode",
        "mla_decode:mla_decode",
        attention_inputs.mla_decode,
        *args,
        tolerances=ATTENTION_TOLERANCE,
    )


def test_query_is_cast_to_e4m3_with_saturation() -> None:
    from millrace_kernels.triton.e4m3 import to_e4m3

    x = torch.tensor([[0.0, 1.0, -1.06, 447.0, 449.0], [-1e6, 1e-4, 31.7, -3.0, 0.07]], dtype=torch.bfloat16)
    assert torch.equal(to_e4m3(x).float(), x.clamp(-448, 448).to(E4M3).float())
    assert to_e4m3(x[:0]).shape == (0, 5)
