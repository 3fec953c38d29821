"""Debug: every page carries the identity of its content, so that a wrong page is an error and never a wrong token.

The last CANARY_BYTES of a page are eight u64. The first four are the block (millrace_common/page_hash.py) of the page
with the tokens whose KV is in it, and the fifth is the number of these. Because a page is one contiguous block, the
canary travels with every transfer. The host gets a sampled token one step after its KV is written, so a page's canary
may be one token behind its content; it never covers a token that is not there.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from millrace_common.reasons import Reason

from millrace_serve.engine.core import Failure

CANARY_BYTES = 64
CANARY_WORDS = 5  # that are used
A = TypeVar("A")  # numpy array or tensor


@dataclass(slots=True)
class CanaryBatch(Generic[A]):
    """`expected` are the words of each page of `pages` before the step; count 0 = not checked."""

    pages: A  # int64 [B, P], 0 past the end
    expected: A  # u64 [B, P, CANARY_WORDS]
    write_pages: A  # int64 [W]
    write_words: A  # u64 [W, CANARY_WORDS]
    names: tuple[str, ...]  # [B] requests, for the message


def mismatches(batch: CanaryBatch[np.ndarray], found: np.ndarray) -> dict[int, Failure]:
    """Compare `found`, u64 [B, P, CANARY_WORDS], with the expected words. Returns failures by index of the sequence."""
    wrong = (batch.expected[:, :, -1] != 0) & (batch.expected != found).any(axis=2)
    failures: dict[int, Failure] = {}
    for row, index in zip(*np.nonzero(wrong), strict=True):
        want, have = batch.expected[row, index].tolist(), found[row, index].tolist()
        message = (
            f"KV page {batch.pages[row, index]} (page {index} of request {batch.names[row]}) holds other tokens: "
            f"hash {have[0]:016x} of {have[-1]} tokens, expected {want[0]:016x} of {want[-1]}"
        )
        failures.setdefault(int(row), Failure(Reason.KV_MISMATCH, message))
    return failures
