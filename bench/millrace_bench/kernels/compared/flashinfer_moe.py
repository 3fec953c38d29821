"""FP8 experts through the CUTLASS grouped GEMMs that FlashInfer has from TensorRT-LLM (sm90), to be compared with
DeepGEMM and ours. A loader would have to bring w13 into another order for them.
"""

import torch
import torch.nn.functional as F
from millrace_kernels.fp8 import Fp8, Operand
from torch import Tensor


def up_first(w13: Fp8) -> Fp8:
    """A copy of w13 [E, 2I, D] with the rows of up before those of gate, I in whole blocks."""
    return Fp8(*(torch.cat(part.chunk(2, dim=1)[::-1], dim=1) for part in w13))


def moe_experts_fp8(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Fp8, w2: Fp8,
    *, shared_expert: bool = False, num_experts: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`moe_experts` of plain rows and of a w13 with `up_first`. The library quantises the rows by itself."""
    from flashinfer.fused_moe import cutlass_fused_moe

    rows, held = (x.plain if isinstance(x, Operand) else x), len(w13.data)
    assert rows is not None and rows.dtype == torch.bfloat16, "plain rows in bfloat16"
    if shared_expert:
        experts, weights = F.pad(experts, (0, 1), value=held - 1), F.pad(weights, (0, 1), value=1.0)
    out = torch.empty_like(rows) if out is None else out
    if len(rows):
        cutlass_fused_moe(
            rows, experts, weights, w13.data, w2.data, torch.bfloat16, [w13.scales, w2.scales], output=out,
            use_deepseek_fp8_block_scale=True,
        )  # fmt: skip
    return out
