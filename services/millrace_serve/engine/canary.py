"""Debug: every page carries the name of its content, so that a wrong page is an error and never a wrong token.

The last CANARY_BYTES of a page are eight u64; the first is the chain hash of the tokens whose KV is in the page, the
second their count. Because a page is one contiguous block, this travels with every transfer. The host learns a
sampled token one step after its KV is written, so a page's canary may be one token behind its content; it never names
a token that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from millrace_rpc.page_hash import chain_hash

from millrace_serve.engine.sequence import Sequence

CANARY_BYTES = 64


@dataclass(slots=True)
class CanaryBatch:
    """`expected` are the first two words of each page in the page table before the step; count 0 = not checked."""

    expected: np.ndarray  # u64 [B, P, 2]
    write_pages: np.ndarray  # int64 [W]
    write_words: np.ndarray  # u64 [W, 2]
    names: list[str]  # [B] requests, for the message


class CanaryTracker:
    """What each slot's pages must hold."""

    def __init__(self, num_slots: int, max_pages: int, page_size: int) -> None:
        self._words = np.zeros((num_slots, max_pages, 2), np.uint64)
        self._known = [0] * num_slots  # tokens that the words cover
        self._page_size = page_size

    def join(self, seq: Sequence, num_tokens: int) -> None:
        """The pages of `seq` come with the KV of its first `num_tokens`."""
        self._words[seq.slot] = 0
        self._known[seq.slot] = 0
        self._advance(seq, num_tokens)

    def build(self, seqs: list[Sequence], num_pages: int) -> CanaryBatch:
        expected = self._words[[seq.slot for seq in seqs], :num_pages]
        pages, words = [], []
        for seq in seqs:
            for index in self._advance(seq, min(len(seq.tokens), seq.num_scheduled)):
                pages.append(seq.pages[index])
                words.append(self._words[seq.slot, index])
        table = np.array(words, np.uint64).reshape(-1, 2)
        return CanaryBatch(expected, np.array(pages, np.int64), table, [str(seq.id) for seq in seqs])

    def _advance(self, seq: Sequence, num_tokens: int) -> range:
        """Cover the first `num_tokens`; returns the pages that changed."""
        size, words, start = self._page_size, self._words[seq.slot], self._known[seq.slot]
        if num_tokens <= start:
            return range(0)
        touched = range(start // size, -(-num_tokens // size))
        for index in touched:
            tokens = seq.tokens[index * size : min((index + 1) * size, num_tokens)]
            words[index] = chain_hash(int(words[index - 1, 0]) if index else 0, tokens), len(tokens)
        self._known[seq.slot] = num_tokens
        return touched


def mismatches(batch: CanaryBatch, page_table: np.ndarray, found: np.ndarray) -> dict[int, str]:
    """Compare what the pages hold, u64 [B, P, 2], with what they must hold. Index of the sequence -> message."""
    wrong = (batch.expected[:, :, 1] != 0) & (batch.expected != found).any(axis=2)
    messages: dict[int, str] = {}
    for row, index in zip(*np.nonzero(wrong), strict=True):
        want, have = batch.expected[row, index].tolist(), found[row, index].tolist()
        messages.setdefault(
            int(row),
            f"KV page {page_table[row, index]} (page {index} of request {batch.names[row]}) holds other tokens: "
            f"hash {have[0]:016x} of {have[1]} tokens, expected {want[0]:016x} of {want[1]}",
        )
    return messages
