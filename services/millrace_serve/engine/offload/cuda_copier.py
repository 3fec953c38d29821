"""Moves pages between a GPU and the host's memory, which is pinned, on streams of their own: one for each direction.

No stream waits for the steps. A page that is stored was written by a step whose results the host has read; a page that
is filled belongs to no launched step; and the step that reads it is launched after the copy has ended.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.offload.page_copier import WAYS, Mark, PageCopier, PageMoves, SharedStore, share


class CudaCopier(PageCopier):
    def __init__(self, pool: KvPool, num_slots: int, shared: SharedStore | None = None, poison: bool = False) -> None:
        """`poison`: pages are scrubbed on the current stream before they are filled."""
        super().__init__(pool, num_slots, shared)
        device = pool.buffer.device
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}
        self._poison = poison
        self._host = torch.from_numpy(self._host)
        # PyTorch's own pinned memory would take the next power of two.
        self._pinned = self._host if shared is None else torch.from_numpy(shared.memory)
        address, nbytes = self._pinned.data_ptr(), self._pinned.nbytes
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if shared is not None and shared.rank:
            self._ended_words = torch.from_numpy(shared.ended)[shared.rank]
            self._counts = torch.full((WAYS,), -1, dtype=torch.int64, device=device)
            torch.cuda.synchronize(device)
            for to_host in self._streams:  # to 0: what a first count loads must not wait for a step
                self._tell(to_host)

    @property
    def address(self) -> int:
        return self._host.data_ptr()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr()))
        self._in_flight, self._host = [], None

    def _copy(self, moves: PageMoves) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        stream = self._streams[moves.to_host]
        if self._poison and not moves.to_host:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            for page, slot, count in runs(*self._part(moves)):
                device, host = self._pool[page : page + count], self._host[slot : slot + count]
                to, source = (host, device) if moves.to_host else (device, host)
                to.copy_(source, non_blocking=True)
            end.record()
        return begin, end

    def _tell(self, to_host: bool) -> None:
        """The device writes the count itself, behind the copy on its stream."""
        count, word = self._counts[int(to_host)], self._ended_words[int(to_host)]
        with torch.cuda.stream(self._streams[to_host]):
            word.copy_(count.add_(1), non_blocking=True)

    def _ended(self, mark: Mark) -> float | None:
        begin, end = mark
        return begin.elapsed_time(end) / 1000 if end.query() else None


def make_copier(
    pool: KvPool, num_slots: int, rank: int, tp: int, exchange: Callable[[bytes], list[bytes]], poison: bool
) -> PageCopier:
    """Collective over all ranks of a worker, as `share` is."""
    shared = share(rank, tp, exchange, num_slots, pool.layout.page_bytes) if num_slots and tp > 1 else None
    if num_slots and pool.buffer.device.type == "cuda":
        return CudaCopier(pool, num_slots, shared, poison)
    return PageCopier(pool, num_slots, shared)


def runs(src_pages: Sequence[int], dst_pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(src, dst, count) of pages that are adjacent on both sides, in order: neighbours travel as one."""
    places = ((src, dst, index) for index, (src, dst) in enumerate(zip(src_pages, dst_pages, strict=True)))
    for _, run in itertools.groupby(places, lambda place: (place[0] - place[2], place[1] - place[2])):
        (src, dst, _), *others = run
        yield src, dst, 1 + len(others)
