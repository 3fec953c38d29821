"""The authentication code of a page on disk: who does not know the deployment's secret cannot make it.

    key  = derive(secret, "page code", fingerprint of the KV layout, which names the weights)
    code = blake2b-256(block + SHA-256 of each part of the page), keyed

Parts are hashed on several threads without the interpreter's lock, so that a disk of several GB/s stays the slower one.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

from millrace_common import deployment_secret

CODE_BYTES = 32
THREADS = 4  # SHA-256 takes 1.3 GB/s on a core
LEAST_PART = 1 << 18  # bytes for which another thread is worth it


class PageCode:
    def __init__(self, secret: bytes, fingerprint: str) -> None:
        """secret: empty: everybody can make codes, which then only show damage."""
        self._key = deployment_secret.derive(secret, "page code", fingerprint)
        self._threads = ThreadPoolExecutor(THREADS, "page-code")

    def of(self, block: bytes, page: memoryview) -> bytes:
        size = max(-(-len(page) // THREADS), LEAST_PART)
        parts = [page[start : start + size] for start in range(0, len(page), size)]
        digests = self._threads.map(_digest, parts) if len(parts) > 1 else map(_digest, parts)
        return hashlib.blake2b(block + b"".join(digests), key=self._key, digest_size=CODE_BYTES).digest()

    def close(self) -> None:
        self._threads.shutdown()


def _digest(part: memoryview) -> bytes:
    return hashlib.sha256(part).digest()
