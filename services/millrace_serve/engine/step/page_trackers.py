"""What a step brings to the checks of pages: their canaries, and which of them get a checksum."""

import numpy as np
from millrace_common.page_hash import page_hashes

from millrace_serve.engine.cache.canary import CANARY_WORDS, CanaryBatch
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.schedule.sequence import Sequence


class CanaryTracker:
    """Debug: the canaries that the pages of a sequence must have before and after a step (engine/cache/canary.py)."""

    def __init__(self, config: EngineConfig) -> None:
        self._words = np.zeros((config.max_running, config.max_pages_per_seq, CANARY_WORDS), np.uint64)
        self._known = [0] * config.max_running  # tokens that the words cover
        self._page_size = config.page_size

    def join(self, seq: Sequence, num_tokens: int) -> None:
        """The pages of `seq` come with the KV of its first `num_tokens`."""
        self._words[seq.slot] = 0
        self._known[seq.slot] = 0
        self._advance(seq, num_tokens)

    def build(self, seqs: list[Sequence], num_pages: int) -> CanaryBatch[np.ndarray]:
        expected = self._words[[seq.slot for seq in seqs], :num_pages]
        table = np.zeros(expected.shape[:2], np.int64)  # rows of drafts may ask for a page more than there can be
        pages, words = [], []
        for row, seq in enumerate(seqs):
            table[row, : len(seq.pages)] = seq.pages[:num_pages]
            for index in self._advance(seq, seq.num_computed):
                pages.append(seq.pages[index])
                words.append(self._words[seq.slot, index])
        written = np.array(words, np.uint64).reshape(-1, CANARY_WORDS)
        return CanaryBatch(table, expected, np.array(pages, np.int64), written, tuple(str(seq.id) for seq in seqs))

    def _advance(self, seq: Sequence, num_tokens: int) -> range:
        """Cover the first `num_tokens`; returns the pages that changed."""
        size, words, start = self._page_size, self._words[seq.slot], self._known[seq.slot]
        if num_tokens <= start:
            return range(0)
        touched = range(start // size, -(-num_tokens // size))
        for index in touched:
            tokens = seq.tokens[index * size : min((index + 1) * size, num_tokens)]
            before = words[index - 1, :-1].tobytes() if index else None
            [block] = page_hashes(tokens, size, salt=seq.request.cache_salt, prev=before)
            words[index, :-1], words[index, -1] = np.frombuffer(block, np.uint64), len(tokens)
        self._known[seq.slot] = num_tokens
        return touched


class SumTracker:
    """The pages that a step completes, which get a checksum (engine/step/page_sums.py)."""

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.page_size
        self._summed = [0] * config.max_running  # leading pages of each slot's sequence with a checksum

    def join(self, seq: Sequence, num_tokens: int) -> None:
        """Full pages of the first `num_tokens` came with theirs."""
        self._summed[seq.slot] = num_tokens // self._size

    def build(self, plan: Plan) -> np.ndarray:
        """int64 [P]"""
        pages = [page for seq in plan.decode for page in self._new(seq, seq.num_computed // self._size)]
        for chunk in plan.chunks:
            last = chunk.samples and chunk.seq.exports
            pages += self._new(chunk.seq, -(-chunk.end // self._size) if last else chunk.end // self._size)
        return np.array(pages, np.int64)

    def _new(self, seq: Sequence, count: int) -> list[int]:
        first, self._summed[seq.slot] = self._summed[seq.slot], count
        return seq.pages[first:count]
