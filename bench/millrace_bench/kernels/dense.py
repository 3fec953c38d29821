"""Dense products, quantisation, norms and SwiGLU at the shapes of one DeepSeek-V3 rank.

Two ranks: TP8, a replica over eight GPUs, whose shard is read by few tokens; and EP8, attention on every GPU on its
own and 32 experts of 256.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Fp8, fp8_linear, quant_blocks, quant_groups, small_linear
from millrace_kernels.int8 import int8_linear, quant_rows
from millrace_kernels.linear import linear
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.silu_mul import silu_mul
from torch import Tensor

from millrace_bench.kernels.case import ANCHORS, Call, Case, candidates


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [N, K] and published times of it on an H200, by tokens."""

    name: str
    n: int
    k: int
    anchors: tuple[tuple[int, float, str], ...] = ()


TP8, EP8 = (
    tuple(Product(name, n, k, tuple(map(tuple, anchors))) for name, n, k, *anchors in ANCHORS[f"{rank}_products"])
    for rank in ("tp8", "ep8")
)
TINY = (Product("tiny", 256, 256),)
NORM_WIDTHS, ACT_WIDTHS = (7168, 1536, 512), (2304, 2048, 256)
SMALL, LARGE = (1, 4, SMALL_TOKENS), (64, 128, 4096)
# Not its shape, which the source leaves open; the ratio of its two times, 81.0 and 53.6 us, is what compares.
SEED_QUANT = "81.0 us without, 53.6 with fast math at an unknown shape"


def cases(device: torch.device) -> Iterator[Case]:
    if device.type != "cuda":
        yield from (_of_product(num, TINY[0], device) for num in (1, 64))
        yield _int8(64, TINY[0], device)
        yield from _elementwise((1, 64), (256,), (128,), device)
        return
    yield from (_of_product(num, product, device) for num in SMALL for product in TP8)
    yield from (_of_product(num, product, device) for num in (*SMALL, *LARGE) for product in EP8)
    yield from (_int8(num, product, device) for num in (64, 4096) for product in EP8[:2])
    yield from _elementwise((1, SMALL_TOKENS, 128, 4096), NORM_WIDTHS, ACT_WIDTHS, device)
    for num in (1, SMALL_TOKENS):
        yield _chain(num, device)


def _of_product(num: int, product: Product, device: torch.device) -> Case:
    """An FP8 weight: by the op that `linear` takes for so many tokens, and as a bfloat16 weight by cuBLAS."""
    n, k, small = product.n, product.k, num <= SMALL_TOKENS
    op = "fp8.small_linear" if small else "fp8.fp8_linear"

    def make() -> dict[str, Call]:
        x, weight = _draw(num, k, device), quant_blocks(_draw(n, k, device))
        plain = torch.empty_like(weight.data, dtype=torch.bfloat16).normal_()
        calls = candidates(op, _fp8_call(x, weight, small), device, num)
        return calls | {"bf16 weight": lambda: linear(x, plain)}

    moved = n * k + num * k * (2 if small else 1) + 2 * num * n
    anchor_us, anchor = next(((us, whose) for at, us, whose in product.anchors if at == num), (None, ""))
    shape = f"T={num} {n}x{k} {product.name}"
    return Case(op, shape, make, moved, 2 * num * n * k, anchor_us, anchor, math="bf16" if small else "fp8")


def _int8(num: int, product: Product, device: torch.device) -> Case:
    n, k = product.n, product.k

    def make() -> dict[str, Call]:
        x, weight = (quant_rows(_draw(rows, k, device)) for rows in (num, n))
        return candidates("int8.int8_linear", lambda: int8_linear(x, weight, torch.bfloat16), device, num)

    moved = n * k + num * k + 2 * num * n
    return Case("int8.int8_linear", f"T={num} {n}x{k} {product.name}", make, moved, 2 * num * n * k, math="fp8")


def _fp8_call(x: Tensor, weight: Fp8, small: bool) -> Call:
    if small:
        return lambda: small_linear(x, weight)
    x8 = quant_groups(x)
    return lambda: fp8_linear(x8, weight, torch.bfloat16)


def _elementwise(
    tokens: tuple[int, ...], norm_widths: tuple[int, ...], act_widths: tuple[int, ...], device: torch.device
) -> Iterator[Case]:
    """Bytes per element: 2 of each bfloat16 tensor read or written, 1 of E4M3."""
    for num in tokens:
        quantised = num > SMALL_TOKENS
        for width in norm_widths:
            weight = _draw(1, width, device)[0]

            for add, quant in ((False, True), (True, False), (True, True)):

                def norm(x: Tensor, weight: Tensor = weight, add: bool = add, quant: bool = quant) -> object:
                    return rms_norm(x, x if add else None, weight, 1e-6, quant=quant)  # x is its own residual

                bytes_each = (6 if add else 4) + (quant and quantised)
                form = " +residual" * add + " fp8" * quant
                yield _rowwise("rms_norm.rms_norm", num, width, norm, device, bytes_each, form)
        for width in act_widths:
            yield _rowwise("silu_mul.silu_mul", num, 2 * width, silu_mul, device, 3)
            quant_too = functools.partial(silu_mul, quant=True)
            yield _rowwise("silu_mul.silu_mul", num, 2 * width, quant_too, device, 2.5 if quantised else 3, " fp8")
    for num in (tokens[-1], 4 * tokens[-1]):
        yield _quant(num, norm_widths[0], device)


def _chain(num: int, device: torch.device) -> Case:
    """The dense MLP of a TP8 rank: four kernels or more in a row."""
    hidden, (gate_up, down) = 7168, ((4608, 7168), (7168, 2304))

    def make() -> dict[str, Call]:
        x, gain = _draw(num, hidden, device), _draw(1, hidden, device)[0]
        first, second = (quant_blocks(_draw(n, k, device)) for n, k in (gate_up, down))

        def call() -> Tensor:
            operand, _ = rms_norm(x, x, gain, 1e-6, quant=True)
            return linear(silu_mul(linear(operand, first), quant=True), second)

        return {"in order": call}

    weights = gate_up[0] * gate_up[1] + down[0] * down[1]
    return Case("dense MLP", f"T={num}", make, weights + 6 * num * hidden, 2 * num * weights)


def _rowwise(
    op: str, num: int, width: int, call: Callable[[Tensor], object], device: torch.device, bytes_each: float,
    form: str = "",
) -> Case:  # fmt: skip
    def make() -> dict[str, Call]:
        x = _draw(num, width, device)
        return candidates(op, lambda: call(x), device, num)

    return Case(op, f"T={num} {width}{form}", make, bytes_each * num * width, 0)


def _quant(num: int, width: int, device: torch.device) -> Case:
    """The op, and on a GPU with one row per program."""

    def make() -> dict[str, Call]:
        x = _draw(num, width, device)
        calls = candidates("fp8.quant_groups", lambda: quant_groups(x), device, num)
        if device.type != "cuda":
            return calls
        from millrace_kernels.triton import quant

        return calls | {"one group a program": lambda: quant.quant_groups(x, (1, 1))}

    return Case("fp8.quant_groups", f"T={num} {width}", make, 3 * num * width, 0, anchor=SEED_QUANT)


def _draw(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(rows, width, device=device, dtype=torch.bfloat16)
