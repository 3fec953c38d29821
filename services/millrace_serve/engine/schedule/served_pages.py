"""Pages that other workers use beside this engine's sequences: cached ones that they read, and ones into which a read
that came too late may still write.
"""

from millrace_serve.engine.cache.block_pool import Holder
from millrace_serve.engine.cache.kv_cache import KvCache
from millrace_serve.engine.core import KvChunk, RequestId

# Served pages cannot be evicted, and our own sequences need room to grow; a prefix fetch that finds no room costs the
# fetching worker what it would have computed without us.
SERVED_SHARE = 0.25


class ServedPages:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._most = int(SERVED_SHARE * cache.pool.total)
        self._served: dict[RequestId, list[int]] = {}
        self._late: dict[RequestId, list[int]] = {}  # by the request that was to use them

    def __len__(self) -> int:
        return len(self._served) + len(self._late)

    def serve_prefix(self, id: RequestId, blocks: list[bytes]) -> KvChunk:
        """The cached pages of `blocks`, as far as they go and the bound allows; they are held until `end`."""
        room = self._most - sum(map(len, self._served.values()))
        pages = self._cache.serve_prefix(blocks[:room])
        if pages:
            self._served[id] = pages
        return KvChunk(id, 0, pages, blocks[: len(pages)], len(pages) * self._cache.page_size, last=True)

    def end(self, id: RequestId) -> None:
        """Idempotent."""
        self._cache.take_back(self._served.pop(id, []))

    def set_aside(self, id: RequestId, pages: list[int]) -> None:
        """Keep pages of a sequence, which gives them up, until `settle`."""
        self._cache.pool.hold(pages, Holder.PUBLISHED)
        self._late[id] = pages

    def settle(self, id: RequestId) -> None:
        """Nothing writes to them any more. Idempotent."""
        self._cache.pool.drop(self._late.pop(id, []), Holder.PUBLISHED)
