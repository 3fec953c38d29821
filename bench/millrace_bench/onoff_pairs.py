"""Optimisations of kernels: two calls on the same inputs, with it and without it.

The calls without it are what a plain implementation launches. Each still takes the fastest kernel for every one of its
parts, so only the optimisation itself makes the difference.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from millrace_kernels import mla_decode
from millrace_kernels.fp8 import Fp8, Operand, fp8_linear, quant_blocks, quant_groups
from millrace_kernels.linear import linear, operand
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_absorb import absorb_q
from millrace_kernels.mla_qkv import kv_store, mla_qkv_norm
from millrace_kernels.moe_experts import expected_rows, moe_experts
from millrace_kernels.moe_gate import GateRule, moe_gate
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.rope import rope
from millrace_kernels.silu_mul import silu_mul
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import LATENT, NOPE, ROPE, ROW, VALUE, Draw
from millrace_kernels.testing.expert_inputs import choose, rule_of
from millrace_kernels.testing.shapes import TINY, V3_TP8, Dims
from millrace_kernels.testing.tolerances import rms_error
from torch import Tensor

from millrace_bench.data import read_data
from millrace_bench.kernels.case import forced
from millrace_bench.kernels.moe import EP8_STEP, TINY_RANK, TP8_SHARED, Rank, draw_weights

Tensors = tuple[Tensor, ...]
Call = Callable[[], Tensor | Tensors]


@dataclass(frozen=True, slots=True)
class Pair:
    """An optimisation at one shape."""

    seed: str
    shape: str
    make: Callable[[], tuple[Call, Call]]  # draws inputs -> with, without
    nbytes: float  # that a call reads
    tolerance: float = 1e-2  # of the two results, as rms_error; BF16 sums in another order
    of: Callable[..., Tensors] = lambda *results: results  # what has to be the same

    def difference(self, on: Call, off: Call) -> float:
        results = [(one,) if isinstance(one, Tensor) else one for one in (on(), off())]
        pairs = zip(*(self.of(*one) for one in results), strict=True)
        return max(_error(one.float(), other.float()) for one, other in pairs)


def _error(one: Tensor, other: Tensor) -> float:
    """Infinities must be at the same places; a merged state of no keys has them."""
    finite = one.isfinite()
    return rms_error(one[finite], other[finite]) if torch.equal(finite, other.isfinite()) else math.inf


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: tuple[int, ...]
    dims: Dims
    heads: tuple[int, ...]
    contexts: tuple[int, ...]
    q_rank: int
    products: tuple[tuple[int, int], ...]  # weights [N, K] of a rank


FULL = Sizes((1, 16, 128), V3_TP8, (16, 128), (1024, 4096, 32768), 1536, ((24576, 1536), (7168, 16384)))
SMALL = Sizes((3, 20), TINY, (2,), (70,), 256, ((256, 256),))


def sizes(tiny: bool) -> Sizes:
    return SMALL if tiny else FULL


MakePairs = Callable[[Sizes, torch.device], Iterator[Pair]]


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

        def off() -> Tensor:
            quantised = quant_groups(x)
            quantised.scales.copy_(by_rows)
            return fp8_linear(quantised, weight, torch.bfloat16)

        return lambda: fp8_linear(quant_groups(x), weight, torch.bfloat16), off

    for num in size.tokens[-1:]:
        for n, k in size.products:
            yield Pair("G8", f"T={num} {n}x{k}", functools.partial(make, num, n, k), n * k)


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
        routed, own = ([Fp8(w.data[part], w.scales[part]) for w in (w13, w2)] for part in (slice(-1), -1))
        x = operand(torch.randn(num, dims.hidden, device=device).bfloat16())
        logits, bias = torch.randn(num, dims.experts, device=device), torch.zeros(dims.experts, device=device)
        weights, experts = moe_gate(logits, bias, rule_of(dims))

        def off() -> Tensor:
            shared = linear(silu_mul(linear(x, own[0]), quant=True), own[1])
            return moe_experts(x, weights, experts, *routed) + shared

        on = functools.partial(moe_experts, x, weights, experts, w13, w2, shared_expert=True)
        return functools.partial(on, num_experts=dims.experts), off

    for num in size.tokens:
        yield Pair("M3", f"T={num} TP8", functools.partial(make, num), _expert_bytes(dims), 5e-2)


def folded_scaling(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M5: the scaling factor is in the weights of the experts' sum; without, one more pass over the sum."""

    def make(num: int) -> tuple[Call, Call]:
        experts = _Experts(size.dims, num, device)
        on, off = (functools.partial(experts, rule_of(size.dims, scaling=factor)) for factor in (SCALING, 1.0))
        return on, lambda: off().mul_(SCALING)

    for num in size.tokens:
        yield Pair("M5", f"T={num} TP8", functools.partial(make, num), _expert_bytes(size.dims))


def real_tokens(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M9: the padding of a graph's bucket chooses no experts; without, it does like every row."""

    def make(rows: int, num: int) -> tuple[Call, Call]:
        experts, rule = _Experts(size.dims, rows, device), rule_of(size.dims)
        real = torch.tensor([num], dtype=torch.int32, device=device)
        return lambda: experts(rule, real)[:num], lambda: experts(rule)[:num]

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

    def __call__(self, rule: GateRule, num_tokens: Tensor | None = None) -> Tensor:
        return moe_experts(self._x, *moe_gate(self._logits, self._bias, rule, num_tokens), *self._weights)


def _expert_bytes(dims: Dims) -> float:
    return 3.0 * dims.top_k * dims.hidden * dims.moe_intermediate


def swapped_operands(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """G14: the experts' weights are the left operand; without, the tokens are."""
    from millrace_kernels.triton import moe_grouped as grouped

    def make(rank: Rank, num: int, height: int, up: Sequence[Any], down: Sequence[Any]) -> tuple[Call, Call]:
        rows = expected_rows(num, rank.dims.top_k, rank.experts)
        tuned = grouped.MEASURED.get(rows, rank.held, rank.size) or LEFT
        x = Operand(None, quant_groups(torch.randn(num, rank.dims.hidden, device=device).bfloat16()))
        chosen = rank.choose(num, device, torch.Generator(device).manual_seed(num), 0.0)
        weights = draw_weights(rank.held, rank.dims.hidden, rank.size, device)
        call = functools.partial(grouped.run, x, *chosen, *weights, shared_expert=rank.shared)
        assert tuned.up.left and tuned.down.left, f"on this GPU T={num} of {rank.name} is not swapped"
        plain = grouped.MoeGroupedConfig(height, grouped.Launch(*up), grouped.Launch(*down))
        return functools.partial(call, config=tuned), functools.partial(call, config=plain)

    launch = grouped.Launch(4, 3, left=True)
    LEFT = grouped.MoeGroupedConfig(grouped.LEFT_ROWS, launch, launch)
    for name, num, *without in read_data("swapped.yaml")["v3" if size is FULL else "tiny"]:
        rank = next(one for one in (EP8_STEP, TP8_SHARED, TINY_RANK) if one.name == name)
        nbytes = 3.0 * rank.held * rank.size * rank.dims.hidden
        yield Pair("G14", f"T={num} {rank.name}", functools.partial(make, rank, num, *without), nbytes)


def neighbours(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """M1: the rows of each expert are found by our kernels, one for few tokens; without, by PyTorch's operations."""
    from millrace_kernels.triton.moe_route import most_rows, route

    held = size.dims.experts

    def make(num: int, alignment: int) -> tuple[Call, Call]:
        _, experts = choose(num, size.dims, device, torch.Generator(device).manual_seed(num))
        num_rows = most_rows(num, size.dims.top_k, held, alignment)

        def on() -> Tensors:
            plan, blocks = route(experts, held, False, alignment)
            return plan.rows, plan.ends, plan.total, blocks.tokens, blocks.experts

        return on, functools.partial(_sorted_rows, experts, held, alignment, num_rows)

    for num, alignment in ((128, 16), (4096, 128)) if size is FULL else ((20, 16), (300, 16)):
        shape = f"T={num} E={held}"
        of = functools.partial(_places, alignment)
        yield Pair("M1", shape, functools.partial(make, num, alignment), 4 * num * size.dims.top_k, 0.0, of)


def _sorted_rows(experts: Tensor, held: int, alignment: int, num_rows: int) -> Tensors:
    """As `route` of tokens whose choices differ, all of them held here."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(held, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    room = (counts + alignment - 1) // alignment * alignment
    until = room.cumsum(0)
    starts, chosen = until - room, flat[order]
    rank = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[chosen]
    rows, tokens = torch.empty_like(flat), flat.new_empty(num_rows)
    rows[order] = starts[chosen] + rank
    tokens[rows] = torch.arange(len(flat), device=flat.device) // experts.shape[1]
    owners = torch.searchsorted(until, torch.arange(0, num_rows, alignment, device=flat.device), right=True)
    return rows.view_as(experts), starts + counts, until[-1:], tokens, owners


def _places(alignment: int, rows: Tensor, ends: Tensor, total: Tensor, tokens: Tensor, owners: Tensor) -> Tensors:
    """What says that the rows are right, in whatever order those of an expert are."""
    at = rows.long()
    return rows.flatten().sort().values, ends, total, tokens[at], owners[at // alignment]


def few_sequences(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A2: a few sequences are decoded by our split-KV kernel; without, by FlashMLA, where it is installed."""

    def make(batch: int, keys: int) -> tuple[Call, Call]:
        inputs = attention_inputs.mla_decode(_draw(device), (keys,) * batch, 1, size.heads[0], torch.bfloat16)

        ours = functools.partial(mla_decode.mla_decode, **inputs)
        if device.type != "cuda":  # the reference stands for the library
            return ours, functools.partial(forced, "mla_decode.mla_decode", "", ours)  # type: ignore[return-value]
        from millrace_kernels.lib import flash_mla

        with mock.patch.object(flash_mla, "FEW_SEQS", 0):
            plan = flash_mla.schedule(inputs["seq_lens"], 1, size.heads[0], torch.bfloat16)
        assert plan is not None, "FlashMLA does not serve this GPU"
        return ours, functools.partial(ours, plan=plan)

    for batch in (1, 4):
        for keys in size.contexts:
            shape = f"B={batch} L={keys} H={size.heads[0]}"
            yield Pair("A2", shape, functools.partial(make, batch, keys), 2 * batch * keys * ROW, 3e-2)


def merged_states(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A4: two partial attentions are merged by one kernel; without, by PyTorch's operations."""

    def make(num: int, heads: int) -> tuple[Call, Call]:
        call = functools.partial(merge_state, **attention_inputs.merge_state(_draw(device), num, heads))
        return call, functools.partial(forced, "merge_state.merge_state", "", call)  # type: ignore[return-value]

    for num in size.tokens:
        for heads in size.heads:
            nbytes = 4 * num * heads * VALUE
            yield Pair("A4", f"T={num} H={heads}", functools.partial(make, num, heads), nbytes)


def no_copies(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A5: queries are absorbed where they lie; without, heads are moved to the front and back, and parts joined."""

    def make(num: int, heads: int) -> tuple[Call, Call]:
        inputs = attention_inputs.absorb_q(_draw(device), num, heads)
        q, w_uk, cos, sin = (inputs[name] for name in ("q", "w_uk", "cos", "sin"))

        def off() -> Tensor:
            nope = q[..., :NOPE].transpose(0, 1).contiguous()
            latent = torch.bmm(nope, w_uk).transpose(0, 1).contiguous()
            return torch.cat((latent, rope(q[..., NOPE:], cos, sin)), -1)

        return functools.partial(absorb_q, **inputs), off

    for num in size.tokens:
        for heads in size.heads:
            shape, nbytes = f"T={num} H={heads}", 2 * heads * NOPE * LATENT
            yield Pair("A5", shape, functools.partial(make, num, heads), nbytes)


def one_pass(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A7, A8, A9: both norms, rotation and the write into the pool in one kernel; without, a kernel for each."""

    def make(num: int) -> tuple[Call, Call]:
        inputs = attention_inputs.mla_qkv_norm(_draw(device), num, size.q_rank, True, torch.bfloat16)

        def on() -> Tensors:
            q, c_kv, k_pe = mla_qkv_norm(**inputs)
            return *_tensors(q), c_kv, k_pe

        def off() -> Tensors:
            q, c_kv, k_pe = inputs["qkv"].split((size.q_rank, LATENT, ROPE), -1)
            normed, _ = rms_norm(q, None, inputs["q_weight"], inputs["eps"], quant=True)
            latent, _ = rms_norm(c_kv, None, inputs["kv_weight"], inputs["eps"])
            rotated = rope(k_pe, inputs["cos"], inputs["sin"])
            assert latent.plain is not None
            kv_store(inputs["kv"], inputs["slots"], latent.plain, rotated)
            return *_tensors(normed), latent.plain, rotated

        return on, off

    for num in size.tokens:
        yield Pair("A7", f"T={num}", functools.partial(make, num), 2 * num * (size.q_rank + ROW), 5e-2)


def _tensors(x: Operand) -> Tensors:
    """The forms that there are."""
    return tuple(form for form in (x.plain, *(x.fp8 or ())) if form is not None)


def _draw(device: torch.device) -> Draw:
    return Draw(device.type, torch.bfloat16)


PAIRS: dict[str, MakePairs] = {
    "A6": one_projection,
    "G8": scales_in_place,
    "G14": swapped_operands,
    "M1": neighbours,
    "M2": gate,
    "M3": shared_expert,
    "M5": folded_scaling,
    "M9": real_tokens,
    "A2": few_sequences,
    "A4": merged_states,
    "A5": no_copies,
    "A7": one_pass,
}
