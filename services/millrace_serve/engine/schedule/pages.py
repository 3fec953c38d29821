"""The pages and slots of sequences: taking them, growing, giving them back, and copies that fill and save them."""

from collections.abc import Callable

from millrace_serve.engine.cache.block_pool import Holder
from millrace_serve.engine.cache.kv_cache import CachedPrefix, KvCache
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.sequence import Phase, Sequence, Trust


class Pages:
    def __init__(self, config: EngineConfig, cache: KvCache) -> None:
        self.cache = cache
        self.size = config.page_size
        self._slots = list(range(config.max_running - 1, -1, -1))

    def count(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def take(self, seq: Sequence, max_cached_pages: int, headroom: int = 0) -> bool:
        """Give `seq` pages for all its tokens, cached ones as far as they go. False: fewer than that and `headroom`
        more are available, and nothing was taken.
        """
        cached, prefix = self.cache.match(seq.tokens, max_cached_pages, seq.request.cache_salt)
        need = self.count(len(seq.tokens)) - len(cached)
        if need + headroom > self.cache.available:
            self.cache.release(prefix, cached)
            return False
        own = self.cache.allocate(need)
        assert own is not None
        seq.pages, seq.prefix = cached + own, prefix
        seq.set_computed(len(cached) * self.size)
        self._set_capacity(seq)
        return True

    def num_cached(self, seq: Sequence) -> int:
        """Leading pages of `seq` that are in the prefix cache, and behind them copies."""
        pages, prefix = self.cache.match(seq.tokens, len(seq.tokens) // self.size, seq.request.cache_salt)
        self.cache.release(prefix, pages)
        return len(pages) + self.cache.host.count(self._behind(seq, len(pages)))

    def fill(self, seq: Sequence, then: Callable[[int], None]) -> bool:
        """Begin to fill pages of `seq` behind those with KV from copies. `then` gets the number of pages that have KV
        in the end. False: there are no copies, or with them fewer pages than somebody else offers.
        """
        own = seq.num_computed // self.size
        pages, blocks, least = seq.pages[own:], self._behind(seq, own), max(seq.num_offered - own, 1)
        return self.cache.host.fill(pages, blocks, least, lambda count: then(own + count))

    def _behind(self, seq: Sequence, own: int) -> list[bytes]:
        """Blocks of the full pages of a prompt behind the first `own`. None where there are no copies of any."""
        num_pages = (len(seq.tokens) - 1) // self.size if self.cache.host.total else 0
        return seq.page_hashes(num_pages, self.size)[own:]

    def save(self, seq: Sequence, then: Callable[[], None]) -> bool:
        """Begin to copy the full pages whose KV is written. False: nothing is copied."""
        if not self.cache.host.total or seq.trust is not Trust.PROVEN:
            return False
        full = seq.num_computed // self.size
        return self.cache.host.save(seq.pages[:full], seq.page_hashes(full, self.size), then)

    def grow(self, seq: Sequence, count: int) -> None:
        """Give `seq` `count` more pages, which must be available."""
        pages = self.cache.allocate(count)
        assert pages is not None
        seq.pages += pages
        self._set_capacity(seq)

    def _set_capacity(self, seq: Sequence) -> None:
        """The last token of a sequence is never fed back, so its position needs no KV."""
        seq.capacity = min(len(seq.pages) * self.size, seq.limit - 1)

    def has_slot(self) -> bool:
        return bool(self._slots)

    def run(self, seq: Sequence) -> None:
        seq.slot = self._slots.pop()
        seq.enter(Phase.RUNNING)

    def free_slot(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            seq.slot = -1

    def share(self, seq: Sequence, num_tokens: int) -> int:
        """Put full pages of leading prompt tokens, whose KV is written, into the prefix cache. Returns their number."""
        assert seq.prefix is not None
        full = num_tokens // self.size
        self.cache.insert(seq.prefix, seq.tokens, seq.pages[:full], seq.prompt_hashes)
        return full

    def release(self, seq: Sequence) -> None:
        """Give all pages back; full ones whose KV is written and known stay in the prefix cache."""
        if seq.prefix is None:
            return
        if seq.trust is Trust.PROVEN:
            full = seq.num_computed // self.size
            self.cache.insert(seq.prefix, seq.tokens, seq.pages[:full], seq.page_hashes(full, self.size))
        self._keep(seq, seq.prefix)
        self.cache.release(seq.prefix, seq.pages)
        self._forget_corrupt(seq)
        seq.pages, seq.prefix, seq.capacity, seq.trust = [], None, 0, Trust.PROVEN
        seq.set_computed(0)

    def hold(self, seq: Sequence) -> None:
        """Keep the published pages of a prompt and give the others back."""
        assert seq.prefix is not None
        self._keep(seq, seq.prefix)
        self.cache.hold(seq.prefix, seq.pages)
        del seq.pages[seq.num_published :]

    def release_held(self, seq: Sequence) -> None:
        """Give the published pages of a held prompt back."""
        assert seq.prefix is not None
        self.cache.unpublish(seq.prefix, seq.pages)
        self._forget_corrupt(seq)

    def unpublish(self, seq: Sequence) -> None:
        """The published pages of a prompt that a launched step still names stay its own."""
        self.cache.pool.drop(seq.pages[: seq.num_published], Holder.PUBLISHED)

    def condemn(self, seq: Sequence) -> None:
        """One of its pages is wrong, which may have come from anywhere."""
        seq.trust = Trust.CORRUPT
        self.cache.host.disk.remove(seq.page_hashes(len(seq.tokens) // self.size, self.size))

    def _keep(self, seq: Sequence, prefix: CachedPrefix) -> None:
        """The time begins when the sequence leaves."""
        if seq.request.keep_s:
            self.cache.keep(prefix, seq.request.keep_s)

    def _forget_corrupt(self, seq: Sequence) -> None:
        """The wrong page may have come from the prefix cache, where the sequence has just left it idle."""
        if seq.trust is Trust.CORRUPT:
            self.cache.flush()
