"""Checksums of KV pages. Any change of one word changes the sum of its page."""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


def page_sums(pool: Tensor, pages: Tensor, num_words: int) -> Tensor:
    """pool int32 [N, words], pages int64 [P] -> int64 [P]: of each page, the sum of word i times 2 i + 1, modulo 2^64,
    over its first `num_words` words.
    """
    if run := implementation("page_sum.page_sums", pool.device, pages.shape[0]):
        return run(pool, pages, num_words)
    weights = 1 + 2 * torch.arange(num_words, device=pool.device)
    return (pool[pages, :num_words] * weights).sum(dim=1)
