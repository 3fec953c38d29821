"""Choice of experts and experts, with an optimisation and without it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from millrace_kernels.fp8 import Fp8
from millrace_kernels.linear import linear, operand
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.moe_gate import GateRule, moe_gate
from millrace_kernels.silu_mul import silu_mul
from millrace_kernels.testing.expert_inputs import rule_of
from millrace_kernels.testing.shapes import Dims
from torch import Tensor

from millrace_bench.kernels.case import forced
from millrace_bench.kernels.moe import draw_weights
from millrace_bench.onoff_pairs import Call, MakePairs, Pair, Sizes

SCALING = 2.5  # V3's routed_scaling_factor


def gate(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M2: the choice of experts as one kernel; without, as PyTorch's operations."""
    dims, rule = size.dims, rule_of(size.dims)

    def make(num: int) -> tuple[Call, Call]:
        logits, bias = (torch.randn(*shape, device=device) for shape in ((num, dims.experts), (dims.experts,)))
        call = functools.partial(moe_gate, logits, 0.1 * bias, rule)
        return call, functools.partial(forced, "moe_gate.moe_gate", "", call)  # type: ignore[return-value]

    for num in size.tokens:
        yield Pair("M2", f"T={num} E={dims.experts}", functools.partial(make, num), 4 * num * dims.experts, 1e-5)


def shared_expert(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M3: the shared expert is one more expert of the same products; without, an MLP of its own and a sum."""
    dims = size.dims

    def make(num: int) -> tuple[Call, Call]:
        w13, w2 = draw_weights(dims.experts + 1, dims.hidden, dims.moe_intermediate, device)
        (routed13, own13), (routed2, own2) = (_split_last(weight) for weight in (w13, w2))
        x = operand(torch.randn(num, dims.hidden, device=device).bfloat16())
        logits, bias = torch.randn(num, dims.experts, device=device), torch.zeros(dims.experts, device=device)
        weights, experts = moe_gate(logits, bias, rule_of(dims))

        def on() -> tuple[Tensor, ...]:
            return (moe_experts(x, weights, experts, w13, w2, shared_expert=True, num_experts=dims.experts),)

        def off() -> tuple[Tensor, ...]:
            shared = linear(silu_mul(linear(x, own13), quant=True), own2)
            return (moe_experts(x, weights, experts, routed13, routed2) + shared,)

        return on, off

    for num in size.tokens:
        yield Pair("M3", f"T={num} TP8", functools.partial(make, num), _expert_bytes(dims), 5e-2)


def _split_last(weight: Fp8) -> tuple[Fp8, Fp8]:
    """A stack of experts, and the last one."""
    return Fp8(weight.data[:-1], weight.scales[:-1]), Fp8(weight.data[-1], weight.scales[-1])


def folded_scaling(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M5: the scaling factor is in the weights of the experts' sum; without, one more pass over the sum."""

    def make(num: int) -> tuple[Call, Call]:
        experts = _Experts(size.dims, num, device)

        def off() -> tuple[Tensor, ...]:
            return (experts(rule_of(size.dims, scaling=1.0))[0].mul_(SCALING),)

        return functools.partial(experts, rule_of(size.dims, scaling=SCALING)), off

    for num in size.tokens:
        yield Pair("M5", f"T={num} TP8", functools.partial(make, num), _expert_bytes(size.dims))


def real_tokens(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M9: the padding of a graph's bucket chooses no experts; without, it does like every row."""

    def make(rows: int, num: int) -> tuple[Call, Call]:
        experts, rule = _Experts(size.dims, rows, device), rule_of(size.dims)
        real = torch.tensor([num], dtype=torch.int32, device=device)

        def on() -> tuple[Tensor, ...]:
            return (experts(rule, real)[0][:num],)

        def off() -> tuple[Tensor, ...]:
            return (experts(rule)[0][:num],)

        return on, off

    for rows in size.tokens[1:]:
        num = rows // 2 + 1
        shape = f"T={num} in a bucket of {rows}, TP8"
        yield Pair("M9", shape, functools.partial(make, rows, num), _expert_bytes(size.dims))


class _Experts:
    """Gate and experts of a TP8 rank on tokens of its own."""

    def __init__(self, dims: Dims, num: int, device: torch.device) -> None:
        self._x = operand(torch.randn(num, dims.hidden, device=device).bfloat16())
        self._logits = torch.randn(num, dims.experts, device=device)
        self._bias = torch.zeros(dims.experts, device=device)
        self._weights = draw_weights(dims.experts, dims.hidden, dims.moe_intermediate, device)

    def __call__(self, rule: GateRule, num_tokens: Tensor | None = None) -> tuple[Tensor, ...]:
        weights, experts = moe_gate(self._logits, self._bias, rule, num_tokens)
        return (moe_experts(self._x, weights, experts, *self._weights),)


def _expert_bytes(dims: Dims) -> float:
    return 3.0 * dims.top_k * dims.hidden * dims.moe_intermediate


PAIRS: dict[str, MakePairs] = {"M2": gate, "M3": shared_expert, "M5": folded_scaling, "M9": real_tokens}
