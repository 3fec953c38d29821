"""Salts of the prefix caches: which requests may share cached pages, decided here and obeyed by workers.

Every router of a deployment needs the same secret. With different ones their prompts share no pages.
"""

from __future__ import annotations

from millrace_common import deployment_secret


class CacheKey:
    def __init__(self, secret: bytes) -> None:
        """secret: of any length; empty: salts differ between groups, and whoever knows a group's name can compute its
        salt.
        """
        self._secret = secret
        self.id = deployment_secret.derive(secret, "cache id")[:8]

    def salt(self, group: str) -> bytes:
        """Return 32 bytes, equal for requests that may share cached pages."""
        return deployment_secret.derive(self._secret, "cache salt", group)
