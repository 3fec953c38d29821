"""out_t = sum over chosen experts e held here of  weight_te * w2_e silu_mul(w13_e x_t)   + w2_s silu_mul(w13_s x_t)

The second term exists with `shared_expert`: the shared expert is one more expert behind the routed ones, and every row
chooses it with weight 1, which saves a launch and a pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.fp8 import BLOCK, Fp8, Operand, dequant_blocks
from millrace_kernels.int8 import Int8, Matrix
from millrace_kernels.linear import linear
from millrace_kernels.silu_mul import reference_silu_mul

MAX_ROWS = 9 << 14  # of a pass, before padding: 16,384 tokens of V3; more take turns, so scratch memory has a bound


def moe_experts(
    x: Tensor | Operand,
    weights: Tensor,
    experts: Tensor,
    w13: Matrix,
    w2: Matrix,
    *,
    shared_expert: bool = False,
    num_experts: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """The experts of this rank applied to the tokens that chose them.

    Args: x: [T, D]. Plain weights and few tokens need its plain form; more tokens with FP8 weights are quantised here
        unless the operand brings its FP8 form. weights: float32 [T, K]; experts: int32 [T, K], each an index into w13
        and w2, or -1 for a choice that another rank computes and for padding. An expert that a token names twice counts
        twice. w13: [E, 2I, D], gate rows then up rows; w2: [E, D, I]; both plain in x's dtype or both FP8 with scales
        of 128 x 128 blocks, [E, 2I/128, D/128] and [E, D/128, I/128], or both INT8, which need plain rows.
        shared_expert: the last of the E experts is the shared one; ids do not name it. num_experts: routed experts of
        all ranks together, 0: those of this rank. It gives the expected rows per expert, and changes only the speed.
        out: [T, D], contiguous, where the result goes.
        Returns: [T, D] in x's dtype, bfloat16 for an x without plain form; 0 for a token none of whose experts is held
        here. The same inputs give the same bits.
    """
    # an operand has one form at least
    rows = x if isinstance(x, Tensor) else x.plain if x.plain is not None else x.fp8.data  # type: ignore[union-attr]
    first, second = (w if isinstance(w, Tensor) else w.data for w in (w13, w2))
    assert type(w13) is type(w2), "w13 and w2 are both plain, both FP8 or both INT8"
    assert experts.shape == weights.shape and experts.shape[0] == rows.shape[0], (experts.shape, rows.shape)
    assert first.shape[0] == second.shape[0] and first.shape[1] == 2 * second.shape[2], (first.shape, second.shape)
    assert first.shape[2] == second.shape[1] == rows.shape[1], (first.shape, second.shape, rows.shape)
    expected = expected_rows(experts.shape[0], experts.shape[1], num_experts or first.shape[0] - shared_expert)
    op = f"moe_experts.{_kind(rows, w13, w2)}"
    if run := implementation(op, rows.device, len(rows), (*second.shape, expected)):
        return run(x, weights, experts, w13, w2, shared_expert=shared_expert, num_experts=num_experts, out=out)
    total = reference_experts(x, weights, experts, w13, w2, shared_expert)
    return total if out is None else out.copy_(total)


def expected_rows(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Expected rows of one expert, as a power of two, so that choices by it change rarely."""
    rows = -(-num_tokens * top_k // num_experts)
    return 1 << max(rows - 1, 0).bit_length()


def _kind(rows: Tensor, w13: Matrix, w2: Matrix) -> str:
    """The op of the table. The fast kernels are for BF16, and for FP8 in whole blocks; other inputs have none."""
    if isinstance(w13, Fp8) and isinstance(w2, Fp8):
        whole = all(size % BLOCK == 0 for size in w2.data.shape[1:])
        return "moe_experts_fp8" if whole and rows.dtype != torch.float32 else "moe_experts_other"
    if isinstance(w13, Int8):
        return "moe_experts_int8"
    return "moe_experts" if rows.dtype == torch.bfloat16 else "moe_experts_other"


def reference_experts(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Matrix, w2: Matrix, shared_expert: bool
) -> Tensor:
    """FP8 experts are computed in FP32, and nothing is quantised on the way; INT8 ones quantise their rows."""
    rows = plain_rows(x)
    num_routed = (w13 if isinstance(w13, Tensor) else w13.data).shape[0] - shared_expert
    if shared_expert:
        experts = F.pad(experts, (0, 1), value=num_routed)
        weights = F.pad(weights, (0, 1), value=1.0)
    order = experts.flatten().argsort(stable=True)  # choices sorted by expert
    counts = torch.bincount(experts.flatten() + 1, minlength=num_routed + shared_expert + 1).tolist()
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    start = counts[0]  # choices that are not computed here
    for expert, count in enumerate(counts[1:]):
        if count:
            choices = order[start : start + count]
            tokens = choices // experts.shape[1]
            outputs = one_expert(rows[tokens], w13, w2, expert)
            out.index_add_(0, tokens, outputs.float() * weights.flatten()[choices].unsqueeze(1))
            start += count
    return out.to(rows.dtype)


def plain_rows(x: Tensor | Operand) -> Tensor:
    """[T, D]"""
    if isinstance(x, Tensor):
        return x
    if x.plain is not None:
        return x.plain
    assert x.fp8 is not None, "an operand without any form"
    data, scales = x.fp8
    return (data.float() * scales.repeat_interleave(BLOCK, 1)[:, : data.shape[1]]).bfloat16()


def one_expert(x: Tensor, w13: Matrix, w2: Matrix, expert: int) -> Tensor:
    """[T, D] -> [T, D], for all tokens"""
    first, second = _weight(w13, expert), _weight(w2, expert)
    x = x if isinstance(first, Int8) else x.to(first.dtype)
    return linear(reference_silu_mul(linear(x, first)), second)


def _weight(weight: Matrix, expert: int) -> Tensor | Int8:
    if isinstance(weight, Int8):
        return Int8(weight.data[expert], weight.scales[expert])
    if isinstance(weight, Fp8):
        return dequant_blocks(weight.data[expert], weight.scales[expert], torch.float32, 0, 0)
    return weight[expert]
