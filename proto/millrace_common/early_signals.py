"""SIGTERM before a process has a handler of its own.

The kernel drops a signal without a handler for the first process of a container, PID 1. Imports take seconds, so a pod
that is deleted meanwhile would otherwise wait for its whole grace period. Every entry point calls `exit_on_sigterm`
before it imports anything else. Standard library only.
"""

from __future__ import annotations

import signal
import sys


def exit_on_sigterm(code: int = 0) -> None:
    """Make SIGTERM raise SystemExit with `code`, until somebody sets another handler."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
