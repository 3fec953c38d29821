"""Blocks: the identity of a KV page's content, equal on every worker and every router.

    block_i = blake2b-256(block_{i-1} || the page's tokens as little-endian u32),  block_{-1} = first_link(salt)

A block is a digest of the salt and of all tokens up to the end of its page. Nobody can find two prefixes of equal
blocks, so equal blocks prove equal tokens. The salt separates the prompts of tenants who do not share a cache; a router
derives it from its secret (deployment_secret.py), and workers take it as it comes.
"""

import hashlib
from array import array
from collections.abc import Iterable

BLOCK_BYTES = 32
MAX_SALT_BYTES = 64


def first_link(salt: bytes) -> bytes:
    """Return the link before the first page of every prompt with this salt."""
    return hashlib.blake2b(salt, digest_size=BLOCK_BYTES, person=b"millrace salt").digest()


def page_hashes(
    tokens: Iterable[int], page_size: int = 64, *, salt: bytes = b"", prev: bytes | None = None
) -> list[bytes]:
    """Return the block of each page of `tokens`, a partial last page included. Arrays and views (I) are packed already.

    prev: the block of the page before `tokens`, in which case `salt` is not used; None: they begin the prompt
    """
    packed, step = tokens if isinstance(tokens, array | memoryview) else array("I", tokens), 4 * page_size
    data = packed.tobytes()
    blocks, link, digest = [], first_link(salt) if prev is None else prev, hashlib.blake2b
    for start in range(0, len(data), step):
        link = digest(link + data[start : start + step], digest_size=BLOCK_BYTES).digest()
        blocks.append(link)
    return blocks
