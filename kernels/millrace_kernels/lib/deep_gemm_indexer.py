"""DeepGEMM's logits of the indexer for sm90: 32 or 64 index heads of 32, 64 or 128 columns, E4M3 keys in pages of 64.

`fp8_paged_mqa_logits` reads the keys of each token from the pages: decode rows, each with a row of the page table.
`fp8_mqa_logits` reads keys that lie back to back, once for all tokens of a prompt chunk: they are gathered before.
Both leave logits at and behind a token's length unwritten.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_kernels.indexer import E4M3, IndexRows, gathered, masked, reference_logits

PAGE, HEADS, WIDTHS = 64, (32, 64), (32, 64, 128)


@dataclass(frozen=True, slots=True)
class IndexerPlan:
    lens: Tensor  # int32 [T, 1]
    schedule: Tensor  # int32 [multiprocessors + 1, 2]: where each begins


def schedule(lens: Tensor) -> IndexerPlan | None:
    import deep_gemm

    if not len(lens):
        return None
    lens = lens.unsqueeze(1)
    return IndexerPlan(lens, _tensor(deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, deep_gemm.get_num_sms())))


def index_logits(
    q: Tensor, weights: Tensor, cache: IndexRows, page_table: Tensor, lens: Tensor, plan: IndexerPlan | None = None
) -> Tensor:
    if not _takes(q, cache) or not len(lens):
        return reference_logits(q, weights, cache, page_table, lens)
    import deep_gemm

    if page_table.shape[0] == len(lens):
        plan, width = plan or schedule(lens), cache.data.shape[2] + 4
        assert plan is not None
        page = cache.data.stride(0)  # of bytes: data, then scales
        fused = cache.data.view(torch.uint8).as_strided((len(cache.data), PAGE, 1, width), (page, width, width, 1))
        found = deep_gemm.fp8_paged_mqa_logits(
            q.unsqueeze(1), fused, weights, plan.lens, page_table, plan.schedule, page_table.shape[1] * PAGE
        )
    else:
        keys = gathered(cache, page_table)
        assert keys.scales is not None
        first = torch.zeros_like(lens)
        found = deep_gemm.fp8_mqa_logits(q, (keys.data[0], keys.scales[0]), weights, first, lens)
    return masked(_tensor(found), lens)


def _takes(q: Tensor, cache: IndexRows) -> bool:
    (_, heads, width), (_, page_size, _) = q.shape, cache.data.shape
    aligned = cache.data.stride(0) % 16 == 0 and cache.data.data_ptr() % 16 == 0  # as TMA loads them
    return q.dtype == E4M3 and heads in HEADS and width in WIDTHS and page_size == PAGE and aligned


def _tensor(found: object) -> Tensor:
    """Its results are torch's tensors where its bindings know torch, else they speak DLPack."""
    return found if isinstance(found, Tensor) else torch.from_dlpack(found)
