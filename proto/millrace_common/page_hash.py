"""Chain hashes of token pages: the identity of a page's content, equal on every worker and every router.

hash_i = blake2b-64(hash_{i-1} as little-endian u64 || the page's tokens as little-endian int32), hash_{-1} = 0
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def chain_hash(prev: int, tokens: Sequence[int]) -> int:
    """u64 of `tokens` following a prefix whose hash is `prev` (0: no prefix)."""
    data = struct.pack(f"<Q{len(tokens)}i", prev, *tokens)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def page_hashes(tokens: Sequence[int], page_size: int = 64, *, prev: int = 0) -> list[int]:
    """Hash of each page of `tokens`, a partial last page included."""
    data, step = struct.pack(f"<{len(tokens)}i", *tokens), 4 * page_size
    hashes, link = [], prev.to_bytes(8, "little")
    for start in range(0, len(data), step):
        link = hashlib.blake2b(link + data[start : start + step], digest_size=8).digest()
        hashes.append(int.from_bytes(link, "little"))
    return hashes
