"""The libraries that are there to be compared, on a GPU that has them, and a CUDA toolkit that can build them."""

import pytest
import torch
from millrace_bench.kernels.absorb import Weights
from millrace_bench.kernels.compared import flashinfer_mla, flashinfer_moe, fp8_heads
from millrace_kernels import backend
from millrace_kernels.backend import forced
from millrace_kernels.fp8 import Fp8
from millrace_kernels.mla_absorb import absorb_q, project_v
from millrace_kernels.mla_decode import mla_decode
from millrace_kernels.moe_experts import reference_experts
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.expert_inputs import draw_experts
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, rms_error
from millrace_testing.compiled import lacking
from millrace_testing.tolerances import ATTENTION_TOLERANCE, FP8_EXPERTS_TOLERANCE, LSE_TOLERANCE, assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]  # FlashInfer compiles CUTLASS for minutes
DEVICE = torch.device("cuda")
REFERENCES = dict.fromkeys(backend.TABLE, "")
EXPERTS = "flashinfer.fused_moe.core:get_cutlass_fused_moe_module"
PRODUCTS = {"grouped": ("deep_gemm",), "batched": ("flashinfer.gemm", "flashinfer.gemm.gemm_base:get_gemm_module")}


def needs(library: str, getter: str = "", *args: object) -> None:
    """A toolkit of nvcc alone lacks the headers of cuBLAS, NVRTC and cuRAND, and the libraries to link with."""
    pytest.importorskip(library)
    if getter and (lack := lacking(getter, *args)):
        pytest.skip(lack)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if backend.capability(DEVICE) != "sm90":
        pytest.skip("they are for sm90")


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("num", [0, 1, 7, 64, 250])
def test_the_absorbed_form_in_fp8(num: int, heads: int, product: str) -> None:
    needs(*PRODUCTS[product])
    draw, run = Draw("cuda", torch.bfloat16), getattr(fp8_heads, product)
    inputs = attention_inputs.absorb_q(draw, num, heads)
    weight = getattr(Weights.of(inputs["w_uk"].transpose(1, 2)), product)
    found = fp8_heads.absorb_q(inputs["q"], weight, inputs["cos"], inputs["sin"], run)
    with forced(**REFERENCES):
        wanted = absorb_q(**inputs)
    assert rms_error(found, wanted) < 1.5 * FP8_TOLERANCE
    values = attention_inputs.project_v(draw, num, heads)
    found = fp8_heads.project_v(values["latent"], getattr(Weights.of(values["w_uv"]), product), run)
    with forced(**REFERENCES):
        assert rms_error(found, project_v(**values)) < 1.5 * FP8_TOLERANCE


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("lens", [(1,), (64, 3, 700), (2000,) * 40])
@pytest.mark.parametrize("queries", [1, 2])
def test_decode_attention_of_flashinfer(queries: int, lens: tuple[int, ...], heads: int) -> None:
    pytest.importorskip("flashinfer.mla")
    inputs = attention_inputs.mla_decode(Draw("cuda", torch.bfloat16), lens, queries, heads, torch.bfloat16)
    with forced(**REFERENCES):
        wanted, wanted_lse = mla_decode(**(inputs | {"q": inputs["q"].float(), "kv": inputs["kv"].float()}))
    out, lse = flashinfer_mla.planned(**inputs)()
    seen = wanted_lse.isfinite()  # the first of two queries behind one key sees none
    assert_close(out[seen], wanted[seen], ATTENTION_TOLERANCE[torch.bfloat16])
    assert_close(lse[seen], wanted_lse[seen], LSE_TOLERANCE)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num", [1, 17, 300])
def test_experts_of_flashinfer(num: int, shared: bool) -> None:
    """A third of the choices are other ranks'."""
    needs("flashinfer.fused_moe", EXPERTS, "90")
    generator = torch.Generator(device=DEVICE).manual_seed(num)
    w13, w2 = draw_experts(17, 1024, 256, torch.bfloat16, True, DEVICE, generator)
    assert isinstance(w13, Fp8) and isinstance(w2, Fp8)
    x = torch.randn(num, 1024, generator=generator, device=DEVICE).bfloat16()
    weights, experts = torch.rand(num, 24, generator=generator, device=DEVICE).topk(8)
    experts = experts.int().masked_fill(experts >= 16, -1)
    reordered = flashinfer_moe.up_first(w13)
    found = flashinfer_moe.moe_experts_fp8(x, weights, experts, reordered, w2, shared_expert=shared)
    assert rms_error(found, reference_experts(x, weights, experts, w13, w2, shared)) < FP8_EXPERTS_TOLERANCE
