"""FP8 products, with an optimisation and without it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from millrace_kernels.fp8 import Fp8, fp8_linear, quant_blocks, quant_groups
from millrace_kernels.linear import linear, operand
from millrace_kernels.testing.attention_inputs import ROW
from torch import Tensor

from millrace_bench.onoff_pairs import Call, MakePairs, Pair, Sizes


def one_projection(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A6: q_a and kv_a are one product; without, two."""
    hidden, split = size.dims.hidden, size.q_rank

    def make(num: int) -> tuple[Call, Call]:
        weight = quant_blocks(torch.randn(split + ROW, hidden, device=device).bfloat16())
        blocks = split // 128
        parts = Fp8(weight.data[:split], weight.scales[:blocks]), Fp8(weight.data[split:], weight.scales[blocks:])
        x = operand(torch.randn(num, hidden, device=device).bfloat16())
        return lambda: linear(x, weight).split((split, ROW), 1), lambda: tuple(linear(x, part) for part in parts)

    for num in size.tokens:
        shape = f"T={num} {split + ROW}x{hidden}"
        yield Pair("A6", shape, functools.partial(make, num), hidden * (split + ROW))


def scales_in_place(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """G8: quantisation writes the scales column by column, as products read them; without, a kernel transposes them."""

    def make(num: int, n: int, k: int) -> tuple[Call, Call]:
        x, weight = torch.randn(num, k, device=device).bfloat16(), quant_blocks(torch.randn(n, k, device=device))
        by_rows = quant_groups(x).scales.contiguous()

        def off() -> tuple[Tensor, ...]:
            quantised = quant_groups(x)
            quantised.scales.copy_(by_rows)
            return (fp8_linear(quantised, weight, torch.bfloat16),)

        return lambda: (fp8_linear(quant_groups(x), weight, torch.bfloat16),), off

    for num in size.tokens[-1:]:
        for n, k in size.products:
            yield Pair("G8", f"T={num} {n}x{k}", functools.partial(make, num, n, k), n * k)


PAIRS: dict[str, MakePairs] = {"A6": one_projection, "G8": scales_in_place}
