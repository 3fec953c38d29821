"""Cutting a text stream before its first stop string.

The first stop string is the one that is complete first; of two that end at the same character, the longer. So the
result does not depend on how the text was cut into pieces. Text that may be the beginning of a stop string is
withheld until that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace_router.text.markers import Prefixes


class StopMatcher:
    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._prefixes = Prefixes(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Return the text that may be shown now. After a match: the text before it, and nothing more."""
        if self.matched:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.matched, self._held = True, ""
            return text[: min(hits)[1]]
        keep = self._prefixes.undecided(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text has ended: return the withheld rest."""
        held, self._held = self._held, ""
        return held
