"""The secret that the routers and workers of a deployment share, and what is made of it.

    derive(secret, use, text) = blake2b-256(text), keyed with blake2b-256(secret), personalised with `use`

Who knows one derived key knows neither the secret nor another one.
"""

import hashlib
from pathlib import Path

LEAST_BYTES = 16


def read(path: Path | None) -> bytes:
    """The file's content without white space around it; empty without a file. Raises OSError when it is unusable."""
    if path is None:
        return b""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise OSError(f"secret: {error}") from error
    if len(secret) < LEAST_BYTES:
        raise OSError(f"secret: {path} has {len(secret)} bytes; it must have at least {LEAST_BYTES}")
    return secret


def derive(secret: bytes, use: str, text: str = "") -> bytes:
    """Return 32 bytes. `use` has at most 16 bytes, and each use has another one. With an empty secret everybody can
    compute them.
    """
    key = hashlib.blake2b(secret, digest_size=32, person=b"millrace").digest()
    return hashlib.blake2b(text.encode(), key=key, digest_size=32, person=use.encode()).digest()


def cache_salt(secret: bytes, group: str) -> bytes:
    """Of the prefix caches: 32 bytes, equal for requests that may share cached pages. Routers decide that, and workers
    obey. Without a secret whoever knows a group's name can compute them.
    """
    return derive(secret, "cache salt", group)


def cache_key_id(secret: bytes) -> bytes:
    """Tells workers whether all routers have one secret. With different ones their prompts share no pages."""
    return derive(secret, "cache id")[:8]
