"""FlashInfer's decode attention for MLA (FlashAttention 3, sm90), to be compared with FlashMLA and ours. It plans on
the host, from lengths there, so each replay of a decode graph would have to wait for a new plan.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

WORKSPACE_BYTES = 128 << 20


def planned(
    q: Tensor, kv: Tensor, page_table: Tensor, seq_lens: Tensor, scale: float, kv_lora_rank: int
) -> Callable[[], tuple[Tensor, Tensor]]:
    """`mla_decode` of sequences that have keys, with its plan made: the call is the kernel alone."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    (num_seqs, queries, heads, width), page, device = q.shape, kv.shape[1], q.device
    counts = -(-seq_lens // page)
    used = torch.arange(page_table.shape[1], device=device) < counts.unsqueeze(1)
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), backend="fa3"
    )
    wrapper.plan(
        queries * torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        F.pad(counts.cumsum(0), (1, 0)).int(), page_table[used], seq_lens,
        heads, kv_lora_rank, width - kv_lora_rank, page, True, scale, q.dtype, kv.dtype,
    )  # fmt: skip
    rows = q.flatten(0, 1)
    parts = [x[..., columns] for x in (rows, kv) for columns in (slice(kv_lora_rank), slice(kv_lora_rank, None))]
    out = q.new_empty(len(rows), heads, kv_lora_rank)
    lse = torch.empty(len(rows), heads, dtype=torch.float32, device=device)

    def run() -> tuple[Tensor, Tensor]:
        wrapper.run(*parts, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)
        return out.unflatten(0, (num_seqs, queries)), lse.unflatten(0, (num_seqs, queries))

    return run
