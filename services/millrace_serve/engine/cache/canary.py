"""Debug: every page carries the identity of its content, so that a wrong page is an error and never a wrong token.

The last CANARY_BYTES of a page are eight u64; the first is the chain hash of the tokens whose KV is in the page, the
second their count. Because a page is one contiguous block, the canary travels with every transfer. The host gets a
sampled token one step after its KV is written, so a page's canary may be one token behind its content; it never covers
a token that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CANARY_BYTES = 64


@dataclass(slots=True)
class CanaryBatch:
    """`expected` are the first two words of each page in the page table before the step; count 0 = not checked."""

    expected: np.ndarray  # u64 [B, P, 2]
    write_pages: np.ndarray  # int64 [W]
    write_words: np.ndarray  # u64 [W, 2]
    names: list[str]  # [B] requests, for the message


def mismatches(batch: CanaryBatch, page_table: np.ndarray, found: np.ndarray) -> dict[int, str]:
    """Compare `found`, u64 [B, P, 2], with the expected words. Returns index of the sequence -> message."""
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
