"""Moves pages between a GPU and the host's memory, which is pinned, on streams of their own: one for each direction.

No stream waits for the steps. A page that is stored was written by a step whose results the host has read; a page that
is filled belongs to no launched step; and the step that reads it is launched after the copy has ended.
"""

from __future__ import annotations

import torch
from millrace_common.page_runs import runs
from torch import Tensor

from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.offload.host_copies import CopyJob
from millrace_serve.engine.offload.page_copier import Mark, PageCopier


class CudaCopier(PageCopier):
    def __init__(self, pool: KvPool, num_slots: int, poison: bool = False) -> None:
        """`poison`: pages are scrubbed on the current stream before they are filled."""
        super().__init__(pool, num_slots)
        device = pool.buffer.device
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}
        self._poison = poison

    @property
    def address(self) -> int:
        return self._host.data_ptr()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        if self.num_slots:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))
        self._in_flight, self._host = [], None

    def _allocate(self, num_slots: int) -> Tensor:
        """PyTorch's own pinned memory would take the next power of two."""
        memory = torch.empty((num_slots, self._page_bytes), dtype=torch.uint8)
        if num_slots:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        return memory

    def _copy(self, job: CopyJob) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        stream = self._streams[job.to_host]
        if self._poison and not job.to_host:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            for page, slot, count in runs(job.pages, [copy.slot for copy in job.copies]):
                device, host = self._pool[page : page + count], self._host[slot : slot + count]
                to, source = (host, device) if job.to_host else (device, host)
                to.copy_(source, non_blocking=True)
            end.record()
        return begin, end

    def _ended(self, mark: Mark) -> float | None:
        begin, end = mark
        return begin.elapsed_time(end) / 1000 if end.query() else None
