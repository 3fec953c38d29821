"""The absorbed form's two products at 1 to 256 tokens: what runs in BF16 or with FP8 weights, beside products with FP8
activations (`compared.fp8_heads`), whole and without the copy into the op's form. `rms`: their error beside cuBLAS in
BF16.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from millrace_kernels.fp8 import BLOCK, E4M3_MAX, Fp8, quant_blocks
from millrace_kernels.mla_absorb import absorb_q, project_v
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import LATENT, NOPE, QK, ROW, VALUE, Draw
from torch import Tensor

from millrace_bench.kernels.case import Call, Case, forced

TOKENS, HEADS = (1, 4, 16, 32, 64, 128, 256), (16, 128)
CUBLAS = "bf16 cublas"


class Weights(NamedTuple):
    """One weight [H, N, K] in the forms of both products."""

    grouped: Fp8  # scales of 128 x 128 blocks
    batched: Fp8  # one scale

    @classmethod
    def of(cls, weight: Tensor) -> "Weights":
        assert weight.shape[1] % BLOCK == 0, weight.shape  # a block lies in one head
        blocks, heads = quant_blocks(weight.flatten(0, 1)), len(weight)
        scale = weight.float().abs().amax().reshape(1) / E4M3_MAX
        grouped = Fp8(blocks.data.unflatten(0, (heads, -1)), blocks.scales.unflatten(0, (heads, -1)))
        return cls(grouped, Fp8((weight.float() / scale).to(torch.float8_e4m3fn).contiguous(), scale))


def cases(device: torch.device) -> Iterator[Case]:
    tokens, heads = (TOKENS, HEADS) if device.type == "cuda" else ((1, 20), (2,))
    draw = Draw(device.type, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for count, num in itertools.product(heads, tokens):
        shape, rows, weight = f"T={num} H={count}", num * count, count * NOPE * LATENT
        for op, make, width in (("absorb_q", _absorb, QK + ROW), ("project_v", _project, LATENT + VALUE)):
            moved, calls = (weight + rows * width) * draw.dtype.itemsize, functools.partial(make, draw, num, count)
            yield Case(f"mla_absorb.{op}", shape, calls, moved, 2 * num * weight, exact=CUBLAS)


def _absorb(draw: Draw, num: int, heads: int) -> dict[str, Call]:
    inputs = attention_inputs.absorb_q(draw, num, heads)
    quantised, op = attention_inputs.fp8_heads(inputs["w_uk"]), "mla_absorb.absorb_q"
    cublas = "millrace_kernels.triton.mla_absorb:absorb_q" if draw.device.type == "cuda" else ""
    calls: dict[str, Call] = {
        CUBLAS: functools.partial(forced, op, cublas, functools.partial(absorb_q, **inputs)),
        "in use": functools.partial(absorb_q, **inputs),
        "in use, fp8 weight": functools.partial(absorb_q, **inputs, quantised=quantised),
    }
    return calls | _fp8("absorb_q", inputs["q"], NOPE, inputs["w_uk"].transpose(1, 2), inputs["cos"], inputs["sin"])


def _project(draw: Draw, num: int, heads: int) -> dict[str, Call]:
    inputs = attention_inputs.project_v(draw, num, heads)
    calls: dict[str, Call] = {CUBLAS: functools.partial(project_v, **inputs)}
    return calls | _fp8("project_v", inputs["latent"], LATENT, inputs["w_uv"])


def _fp8(op: str, x: Tensor, width: int, weight: Tensor, *more: Tensor) -> dict[str, Call]:
    """`width`: of the columns of x that are multiplied."""
    if x.device.type != "cuda":
        return {}
    from millrace_bench.kernels.compared import fp8_heads

    calls: dict[str, Call] = {}
    for name, form in Weights.of(weight)._asdict().items():
        product = getattr(fp8_heads, name)
        calls[f"fp8 {name}"] = functools.partial(getattr(fp8_heads, op), x, form, *more, product)
        calls[f"fp8 {name}, no copy"] = functools.partial(product, x[..., :width], form)
    return calls
