"""With `limits.checks: [checksum]` each page carries a checksum of its bytes, so that a bit which changes on the way to
another worker costs a transfer and never makes a wrong token.

The step that fills a page writes its checksum; a prompt that another worker reads has one for its last page, too. The
worker that reads a page checks it before a step uses it (transfer/checked.py).
"""

from collections.abc import Sequence

import torch
from millrace_kernels.page_sum import page_sums
from torch import Tensor

from millrace_serve.engine.cache.kv_pool import KvPool

WORD = 5  # of the u64 at the end of a page, behind those of the canary


class PageSums:
    def __init__(self, pool: KvPool) -> None:
        self._pages = pool.buffer.view(torch.int32).view(pool.num_pages, -1)
        self._num_words = pool.layout.kv_bytes // 4
        self._sums = self._pages[:, self._num_words :].view(torch.int64)[:, WORD]
        # of `wrong`, before the kernels of a step
        self._stream = torch.cuda.Stream(self._pages.device, priority=-1) if self._pages.is_cuda else None

    def write(self, pages: Tensor) -> None:
        """Checksums of pages, int64 [P], behind the work of the current stream."""
        self._sums[pages] = page_sums(self._pages, pages, self._num_words)

    def wrong(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that have other bytes than their checksums say."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            numbers = torch.tensor(pages, device=self._pages.device)
            bad = self._sums[numbers] != page_sums(self._pages, numbers, self._num_words)
            return numbers[bad].tolist()
