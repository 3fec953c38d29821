"""Our side of libraries that are there to be compared: stand-ins with their calling conventions take their place."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from millrace_bench.kernels.absorb import Weights
from millrace_bench.kernels.compared import flashinfer_mla, flashinfer_moe, fp8_heads
from millrace_bench.kernels.compared.heads_quant import heads_cast, heads_quant
from millrace_kernels.fp8 import Fp8, fp8_linear, quant_blocks
from millrace_kernels.lib import flashinfer_gemm
from millrace_kernels.mla_absorb import absorb_q, project_v
from millrace_kernels.mla_decode import mla_decode
from millrace_kernels.moe_experts import reference_experts
from millrace_kernels.moe_masked import BLOCK_ROWS
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import LATENT, ROPE, Draw
from millrace_kernels.testing.expert_inputs import draw_experts
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, assert_close, dequantised, rms_error
from millrace_kernels.triton import quant
from millrace_testing.compiled import lacking
from torch import Tensor

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
HEADS = 2
Pair = tuple[Tensor, Tensor]


def library(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    if "." in name:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The masked GEMM, which insists on the layouts that TMA loads; the rows that it was told to expect."""
    seen: list[int] = []

    def masked(a: Pair, b: Pair, d: Tensor, counts: Tensor, expected: int) -> None:
        (heads, rows, k), n = a[0].shape, b[0].shape[1]
        assert a[0].is_contiguous() and b[0].is_contiguous() and d.is_contiguous() and d.shape == (heads, rows, n)
        assert a[0].dtype == b[0].dtype == E4M3 and d.dtype == BF16 and counts.dtype == torch.int32
        assert a[1].shape == (heads, rows, k // 128) and a[1].stride() == (k // 128 * rows, 1, rows)
        assert rows % BLOCK_ROWS == 0, "it writes whole blocks, over the next head's rows"
        assert b[0].shape == (heads, n, k) and b[1].shape == (heads, n // 128, k // 128) and b[1].is_contiguous()
        d.fill_(torch.nan)
        for head, count in enumerate(counts.tolist()):
            x, weight = Fp8(a[0][head, :count], a[1][head, :count]), Fp8(b[0][head], b[1][head])
            d[head, :count] = fp8_linear(x, weight, BF16)
        seen.append(expected)

    library(monkeypatch, "deep_gemm", fp8_m_grouped_gemm_nt_masked=masked)
    return seen


@pytest.fixture
def flashinfer_bmm(monkeypatch: pytest.MonkeyPatch) -> None:
    def bmm_fp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert a.is_contiguous() and b.transpose(1, 2).is_contiguous() and a.dtype == b.dtype == E4M3
        assert a_scale.shape == b_scale.shape == (1,) and a_scale.dtype == b_scale.dtype == torch.float32
        return (a.float() @ b.float() * a_scale * b_scale).to(dtype)

    library(monkeypatch, "flashinfer.gemm", bmm_fp8=bmm_fp8)


@pytest.mark.parametrize("num", [0, 1, 7])
def test_rows_of_heads_are_quantised_where_they_are_turned(num: int) -> None:
    q = Draw(dtype=BF16).part(num, HEADS, 256)
    found = heads_quant(q)
    assert found.data.shape == (HEADS, BLOCK_ROWS if num else 0, 256)
    for head in range(HEADS):
        wanted, rows = quant.quant_groups(q[:, head]), Fp8(found.data[head, :num], found.scales[head, :num])
        assert torch.equal(dequantised(rows), dequantised(wanted))
    large = q.clone().mul_(1000)
    assert torch.equal(heads_cast(large).float(), large.clamp(-448, 448).to(E4M3).transpose(0, 1).float())


@pytest.mark.parametrize("num", [0, 1, 7])
@pytest.mark.parametrize("product", ["grouped", "batched"])
def test_the_absorbed_form_in_fp8(num: int, product: str, deep_gemm: list[int], flashinfer_bmm: None) -> None:
    draw, run = Draw(dtype=BF16), getattr(fp8_heads, product)
    inputs = attention_inputs.absorb_q(draw, num, HEADS)
    weight = getattr(Weights.of(inputs["w_uk"].transpose(1, 2)), product)
    found = fp8_heads.absorb_q(inputs["q"], weight, inputs["cos"], inputs["sin"], run)
    wanted = absorb_q(**inputs)
    assert found.shape == wanted.shape and torch.equal(found[..., 512:], wanted[..., 512:])
    assert rms_error(found, wanted) < 1.5 * FP8_TOLERANCE
    values = attention_inputs.project_v(draw, num, HEADS)
    found = fp8_heads.project_v(values["latent"], getattr(Weights.of(values["w_uv"]), product), run)
    assert found.is_contiguous() and rms_error(found, project_v(**values)) < 1.5 * FP8_TOLERANCE
    assert deep_gemm == ([num, num] if num and product == "grouped" else [])


class MlaWrapper:
    """FlashInfer's, which has no keys before its plan."""

    def __init__(self, workspace: Tensor, backend: str) -> None:
        assert workspace.dtype == torch.uint8 and backend == "fa3"

    def plan(self, starts: Tensor, pages: Tensor, indices: Tensor, lens: Tensor, *shapes: Any) -> None:
        self.heads, *widths, page, causal, self.scale, q_dtype, kv_dtype = shapes
        assert widths == [LATENT, ROPE] and causal and q_dtype == kv_dtype
        assert {x.dtype for x in (starts, pages, indices, lens)} == {torch.int32} and len(indices) == pages[-1]
        assert torch.equal(pages.diff(), -(-lens // page))
        self.starts, self.pages, self.indices, self.lens = starts.tolist(), pages.tolist(), indices, lens.tolist()

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, *, out: Tensor, lse: Tensor, return_lse: bool,
        return_lse_base_on_e: bool,
    ) -> None:  # fmt: skip
        assert return_lse and return_lse_base_on_e and q_nope.shape == out.shape and lse.shape == out.shape[:2]
        q = torch.cat((q_nope, q_pe), 2).float()
        for seq, length in enumerate(self.lens):
            at = self.indices[self.pages[seq] : self.pages[seq + 1]].long()
            keys = torch.cat((ckv[at], kpe[at]), 2).flatten(0, 1)[:length].float()
            for row in range(self.starts[seq], self.starts[seq + 1]):
                seen = keys[: length - (self.starts[seq + 1] - 1 - row)]
                scores = self.scale * q[row] @ seen.T
                out[row], lse[row] = scores.softmax(-1) @ seen[:, :LATENT], scores.logsumexp(-1)


@pytest.mark.parametrize("queries", [1, 2])
def test_decode_attention_of_flashinfer(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=MlaWrapper)
    inputs = attention_inputs.mla_decode(Draw(), (64, 3, 130), queries, HEADS, torch.float32)
    out, lse = flashinfer_mla.planned(**inputs)()
    wanted, wanted_lse = mla_decode(**inputs)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)


def sm90(x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, out: Tensor) -> Tensor:
    (num, k), n = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and out.dtype == BF16 and n % 64 == 0 and k % 128 == 0
    assert x_scales.shape == (num, k // 128) and x_scales.stride() == (1, -(-num // 4) * 4)
    assert w_scales.shape == (-(-n // 128), k // 128) and w_scales.is_contiguous()
    return out.copy_(fp8_linear(Fp8(x, x_scales), Fp8(weight, w_scales), BF16))


def groupwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, scale_major_mode: str | None, out_dtype: torch.dtype,
    backend: str,
) -> Tensor:  # fmt: skip
    (num, k), n = a.shape, b.shape[0]
    assert num % 4 == 0 and n % 128 == k % 128 == 0 and a.is_contiguous() and b.is_contiguous() and k >= 256
    assert scale_major_mode == {"cutlass": "K", "trtllm": None}[backend] and out_dtype == BF16
    assert a_scale.shape == (num, k // 128)
    if backend == "cutlass":
        assert a_scale.is_contiguous() and b_scale.is_contiguous() and b_scale.shape == (n // 128, k // 128)
    else:
        assert a_scale.t().is_contiguous() and b_scale.t().is_contiguous() and b_scale.shape == (k // 128, n // 128)
        b_scale = b_scale.t()
    return fp8_linear(Fp8(a, a_scale), Fp8(b, b_scale), BF16)


@pytest.mark.parametrize("function", ["fp8_linear_sm90", "fp8_linear_cutlass", "fp8_linear_trtllm"])
@pytest.mark.parametrize(
    ("num", "n", "k", "dtype"), [(0, 128, 256, BF16), (5, 128, 256, BF16), (8, 136, 256, BF16), (3, 128, 256, None)]
)
def test_products_of_flashinfer(
    function: str, num: int, n: int, k: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(product: Any) -> Any:
        return lambda *args, **options: (calls.append(1), product(*args, **options))[1]

    library(
        monkeypatch, "flashinfer.gemm",
        fp8_blockscale_gemm_sm90=counted(sm90), gemm_fp8_nt_groupwise=counted(groupwise),
    )  # fmt: skip
    x, weight = quant.quant_groups(torch.randn(num, k).bfloat16()), quant_blocks(torch.randn(n, k))
    out_dtype = dtype or torch.float32
    found = getattr(flashinfer_gemm, function)(x, weight, out_dtype)
    assert found.dtype == out_dtype and len(calls) == (num > 0 and n == 128 and dtype is not None)
    assert_close(found, fp8_linear(x, weight, out_dtype))


@pytest.mark.parametrize("of_weight", [False, True])
def test_scales_that_flashinfer_would_misread_are_ours(of_weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, "flashinfer.gemm", fp8_blockscale_gemm_sm90=sm90)
    x, weight = quant.quant_groups(torch.randn(5, 256).bfloat16()), quant_blocks(torch.randn(256, 256))
    if of_weight:
        weight = Fp8(weight.data, weight.scales.t().contiguous().t())
    else:
        x = Fp8(x.data, x.scales.contiguous())
    assert_close(flashinfer_gemm.fp8_linear_sm90(x, weight, BF16), fp8_linear(x, weight, BF16))


@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_flashinfer(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def cutlass_fused_moe(
        rows: Tensor, experts: Tensor, weights: Tensor, w31: Tensor, w2: Tensor, dtype: torch.dtype,
        scales: list[Tensor], *, output: Tensor, use_deepseek_fp8_block_scale: bool,
    ) -> None:  # fmt: skip
        assert use_deepseek_fp8_block_scale and rows.dtype == dtype == output.dtype == BF16
        assert experts.dtype == torch.int32 and weights.dtype == torch.float32 and experts.shape == weights.shape
        assert all(part.is_contiguous() for part in (rows, w31, w2, *scales))
        w13 = flashinfer_moe.up_first(Fp8(w31, scales[0]))  # its own inverse
        output.copy_(reference_experts(rows, weights, experts, w13, Fp8(w2, scales[1]), False))

    library(monkeypatch, "flashinfer.fused_moe", cutlass_fused_moe=cutlass_fused_moe)
    generator = torch.Generator().manual_seed(0)
    w13, w2 = draw_experts(4, 256, 128, BF16, True, CPU, generator)
    assert isinstance(w13, Fp8) and isinstance(w2, Fp8)
    x = torch.randn(6, 256, generator=generator).bfloat16()
    experts = torch.tensor([[0, 2], [1, -1], [-1, -1], [2, 2], [0, 1], [1, 0]], dtype=torch.int32)
    weights = torch.rand(6, 2, generator=generator)
    options = {"shared_expert": shared}
    out = torch.empty_like(x)
    found = flashinfer_moe.moe_experts_fp8(x, weights, experts, flashinfer_moe.up_first(w13), w2, **options, out=out)
    assert found is out
    assert_close(found, reference_experts(x, weights, experts, w13, w2, shared))
    with pytest.raises(AssertionError, match="plain rows"):
        flashinfer_moe.moe_experts_fp8(x.float(), weights, experts, w13, w2)


@pytest.mark.parametrize(
    "line", ["cudaUtils.h:19:10: fatal error: cublasLt.h: No such file or directory", "ld: cannot find -lnvrtc"]
)
def test_a_toolkit_that_lacks_a_part_is_named_once(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def build(arch: str) -> None:
        calls.append(arch)
        raise RuntimeError(f"Ninja build failed.\nninja: Entering directory\n  {line}\ncompilation terminated.")

    library(monkeypatch, "compiling.library", build=build)
    lacking.cache_clear()
    assert [lacking("compiling.library:build", "90") for _ in range(2)] == [line] * 2
    assert calls == ["90"]


def test_any_other_error_of_a_build_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        raise RuntimeError("Ninja build failed.\nbinding.cu(7): error: expected a type")

    library(monkeypatch, "compiling.library", build=build, works=lambda: None)
    lacking.cache_clear()
    assert lacking("compiling.library:works") == ""
    with pytest.raises(RuntimeError, match="expected a type"):
        lacking("compiling.library:build")
