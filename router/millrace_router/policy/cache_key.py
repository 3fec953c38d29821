"""Salts of the prefix caches: which requests may share cached pages, decided here and obeyed by workers.

    salt = blake2b-256(group), keyed with the deployment's secret

Every router of a deployment needs the same secret. With different ones nothing breaks: their prompts share no pages.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

LEAST_BYTES = 16


class CacheKey:
    def __init__(self, secret: bytes) -> None:
        """secret: of any length; empty: salts differ between groups, and whoever knows a group's name can compute its
        salt.
        """
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"millrace cache").digest()
        self.id = self._digest(b"id", "")[:8]

    @classmethod
    def read(cls, path: Path | None) -> CacheKey:
        """Raises OSError when the file is unusable."""
        secret = b"" if path is None else path.read_bytes().strip()
        if path is not None and len(secret) < LEAST_BYTES:
            raise OSError(f"cache_key: {path} has {len(secret)} bytes; it needs {LEAST_BYTES} at least")
        return cls(secret)

    def salt(self, group: str) -> bytes:
        """Return 32 bytes, equal for requests that may share cached pages."""
        return self._digest(b"salt", group)

    def _digest(self, use: bytes, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=32, person=use).digest()
