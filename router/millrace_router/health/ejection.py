"""The ejection of a worker that fails several times in a row. Pure; a clock is passed in.

An ejected worker gets requests again after its pause. Each ejection lasts longer than the one before; each WINDOW_S
without an ejection lowers the count by one. A worker that comes back and fails before its first success is ejected at
once.
"""

import math
from dataclasses import dataclass

from millrace_router.config import OutlierRules

WINDOW_S = 30.0
LONGEST_PAUSE_S = 300.0


@dataclass(slots=True)
class Record:
    """The recent record of one worker's process."""

    in_a_row: int = 0  # failures since the last success
    ejected_until: float = 0.0
    ejections: int = 0

    def spoke(self) -> None:
        """A success: the first output for a request."""
        self.in_a_row = 0

    def failed(self, rules: OutlierRules, now: float) -> bool:
        """A failure for which no other worker can be to blame. Returns whether it ejects the worker."""
        if now < self.ejected_until:  # what was sent before an ejection prolongs no ejection
            return False
        self.in_a_row += 1
        if self.in_a_row < rules.consecutive:
            return False
        quiet = math.floor((now - self.ejected_until) / WINDOW_S)  # windows since the previous ejection ended
        self.ejections = max(self.ejections - quiet, 0) + 1
        self.ejected_until = now + min(rules.pause * self.ejections, LONGEST_PAUSE_S)
        self.in_a_row = rules.consecutive - 1
        return True
