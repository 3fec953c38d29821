"""The gate and the experts at the shapes of one DeepSeek-V3 rank.

TP8 holds an eighth of every expert, EP8 32 whole experts of 256 and sees the tokens of all eight ranks. "EP8 step" is
what `millrace bench shard` runs: the rank's own tokens and the shared expert, with all choices folded onto 32 experts.
Choices are those of V3's group-limited gate on random logits, or skewed by a power law with exponent 1.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from millrace_kernels import moe_gate
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Fp8, Operand, quant_groups
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.testing.expert_inputs import choose, draw_experts, held_ids, rule_of
from millrace_kernels.testing.shapes import TINY, V3_TP8, Dims
from torch import Tensor

from millrace_bench.kernels.case import ANCHORS, Call, Case, candidates

ROUTER = "aiconfigurator, SGLang 0.5.14, the router of TP8"
Anchor = tuple[float, str]
_seeds = itertools.count()


@dataclass(frozen=True, slots=True)
class Rank:
    name: str
    dims: Dims
    held: int
    size: int  # I
    first: int = 0
    shared: bool = False
    folded: bool = False  # expert e of the gate counts as expert e modulo those held

    @property
    def experts(self) -> int:
        """Routed experts that the tokens seen here are spread over."""
        return self.held - self.shared if self.folded else self.dims.experts

    def choose(self, num: int, device: torch.device, generator: torch.Generator, skew: float) -> tuple[Tensor, Tensor]:
        """weights float32 [T, K], experts int32 [T, K] as the rank has them: -1 for those of other ranks"""
        weights, experts = choose(num, self.dims, device, generator, skew)
        return weights, held_ids(experts % self.experts, self.first, self.held - self.shared)


TP8 = Rank("TP8", V3_TP8, 256, 256)
TP8_SHARED = Rank("TP8 + shared", V3_TP8, 257, 256, shared=True)
EP8 = Rank("EP8", V3_TP8, 32, 2048, first=96)
EP8_STEP = Rank("EP8 step", V3_TP8, 33, 2048, shared=True, folded=True)
TINY_RANK = Rank("tiny", TINY, 16, 128)

# Tokens that the rank sees (EP8: of all ranks) -> published time.
TP8_TOKENS, EP8_TOKENS, STEP_TOKENS, SKEWED_TP8 = (
    {num: tuple(anchor) if anchor else None for num, anchor in ANCHORS[f"{kind}_experts"].items()}
    for kind in ("tp8", "ep8", "step", "skewed_tp8")
)
SKEWED = ((TP8, SKEWED_TP8), (EP8, {1024: None, 8192: None}))


def cases(device: torch.device) -> Iterator[Case]:
    if device.type != "cuda":
        yield from _gate(2, TINY, device)
        yield of_experts(TINY_RANK, 2, None, device)
        return
    for num in (1, 4, SMALL_TOKENS, 128, 256, 4096):
        yield from _gate(num, V3_TP8, device)
    shared_tokens: dict[int, Anchor | None] = {1: None, SMALL_TOKENS: None, 32: None}
    ranks = {TP8: TP8_TOKENS, TP8_SHARED: shared_tokens, EP8_STEP: STEP_TOKENS, EP8: EP8_TOKENS}
    for rank, tokens in ranks.items():
        for num, anchor in tokens.items():
            yield of_experts(rank, num, anchor, device)
    for rank, skewed in SKEWED:
        yield from (of_experts(rank, num, anchor, device, skew=1.0) for num, anchor in skewed.items())


def _gate(num: int, dims: Dims, device: torch.device) -> Iterator[Case]:
    def logits() -> dict[str, Call]:
        x, weight = (torch.randn(n, dims.hidden, device=device).bfloat16() for n in (num, dims.experts))
        calls = candidates("moe_gate.gate_logits", lambda: moe_gate.gate_logits(x, weight), device, num)
        if device.type == "cuda" and num <= 256:
            from millrace_kernels.lib import cublas

            calls |= {"lib.cublas": lambda: cublas.gate_logits(x, weight)}
        return calls

    def gate() -> dict[str, Call]:
        parts = torch.randn(-(-dims.hidden // 256), num, dims.experts, device=device)
        bias = torch.zeros(dims.experts, device=device)
        call = functools.partial(moe_gate.moe_gate, bias=bias, rule=rule_of(dims))
        calls = candidates("moe_gate.moe_gate", functools.partial(call, parts[0]), device, num)
        return calls | {"logits in parts": functools.partial(call, parts)}

    moved = 2 * dims.hidden * (num + dims.experts) + 4 * num * dims.experts
    us = 5.9 if dims is V3_TP8 and num <= SMALL_TOKENS else None
    shape = f"T={num} {dims.experts}x{dims.hidden}"
    yield Case("moe_gate.gate_logits", shape, logits, moved, 2 * num * dims.experts * dims.hidden, us, ROUTER)
    yield Case("moe_gate.moe_gate", f"T={num} E={dims.experts}", gate, 4 * num * (dims.experts + 2 * dims.top_k), 0)


def of_experts(
    rank: Rank, num: int, anchor: Anchor | None, device: torch.device, skew: float = 0.0, compared: bool = False
) -> Case:
    """compared: with FlashInfer's, which take minutes to compile."""
    dims, used = rank.dims, _used(rank, num, skew)
    rows = num * dims.top_k * (rank.held - rank.shared) / rank.experts + rank.shared * num
    bytes_each = 3 * rank.size * dims.hidden
    moved = used * bytes_each + num * dims.hidden * (4 if num <= SMALL_TOKENS else 3)
    shape = f"T={num} {rank.name}" + (" skewed" if skew else "")
    make, (us, whose) = functools.partial(_calls, rank, num, skew, device, compared), anchor or (None, "")
    op, flops = "moe_experts.moe_experts_fp8", 2 * rows * bytes_each
    return Case(op, shape, make, moved, flops, us, whose, math="bf16" if num <= SMALL_TOKENS else "fp8")


def _calls(rank: Rank, num: int, skew: float, device: torch.device, compared: bool) -> dict[str, Call]:
    """Of one routing; the weights are the same in all sets, and few tokens read other experts in each."""
    generator = torch.Generator(device=device).manual_seed(next(_seeds))
    x = torch.randn(num, rank.dims.hidden, generator=generator, device=device).bfloat16()
    weights, experts = rank.choose(num, device, generator, skew)
    w13, w2 = draw_weights(rank.held, rank.dims.hidden, rank.size, device)
    operand = Operand(x, None) if num <= SMALL_TOKENS else Operand(None, quant_groups(x))
    arguments = (operand, weights, experts, w13, w2)
    options = {"shared_expert": rank.shared, "num_experts": rank.experts}
    call = functools.partial(moe_experts, *arguments, **options)  # type: ignore[arg-type]
    calls = candidates("moe_experts.moe_experts_fp8", call, device, num)
    if device.type != "cuda":
        return calls
    calls |= _others(rank, x, arguments, options)
    return calls | (_flashinfer(rank, x, weights, experts, w2) if compared else {})


def _others(
    rank: Rank, x: Tensor, arguments: tuple[Operand, Tensor, Tensor, Fp8, Fp8], options: dict[str, int]
) -> dict[str, Call]:
    """What the table does not choose for this size: other sizes' kernels, configurations untuned."""
    from millrace_kernels.triton import moe_grouped, moe_small

    num, (_, *rest) = x.shape[0], arguments
    calls: dict[str, Call] = {}
    if SMALL_TOKENS < num <= moe_small.MOST_TOKENS:
        calls["small"] = functools.partial(moe_small.moe_experts_fp8, x, *rest, **options)  # type: ignore[arg-type]
    if SMALL_TOKENS < num <= 1024:
        launch = moe_grouped.Launch(4, 2)
        untuned = moe_grouped.MoeGroupedConfig(64, launch, launch._replace(block_n=64))
        calls["grouped, untuned"] = functools.partial(
            moe_grouped.run, *arguments, shared_expert=rank.shared, config=untuned
        )
    return calls


def _flashinfer(rank: Rank, x: Tensor, weights: Tensor, experts: Tensor, w2: Fp8) -> dict[str, Call]:
    from millrace_bench.kernels.compared import flashinfer_moe

    w13 = _up_first(*w2.data.shape, x.device)
    call = functools.partial(flashinfer_moe.moe_experts_fp8, x, weights, experts, w13, w2, shared_expert=rank.shared)
    return {"flashinfer cutlass": call}


@functools.lru_cache(maxsize=1)
def _up_first(held: int, dim: int, size: int, device: torch.device) -> Fp8:
    """w13 of `draw_weights` as FlashInfer reads it."""
    from millrace_bench.kernels.compared import flashinfer_moe

    return flashinfer_moe.up_first(draw_weights(held, dim, size, device)[0])


@functools.lru_cache(maxsize=1)
def draw_weights(held: int, dim: int, size: int, device: torch.device) -> tuple[Fp8, Fp8]:
    generator = torch.Generator(device=device).manual_seed(0)
    w13, w2 = draw_experts(held, dim, size, torch.bfloat16, True, device, generator)
    assert isinstance(w13, Fp8) and isinstance(w2, Fp8)
    return w13, w2


@functools.cache
def _used(rank: Rank, num: int, skew: float) -> float:
    """How many of the rank's experts are chosen, in a sample of the same choices."""
    samples, generator = 8, torch.Generator().manual_seed(0)
    total = 0
    for _ in range(samples):
        _, experts = rank.choose(min(num, 2048), torch.device("cpu"), generator, skew)
        total += int((experts.unique() >= 0).sum())
    return total / samples + rank.shared
