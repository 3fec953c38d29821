"""See millrace_rpc/gc_hooks.py."""

from millrace_rpc.gc_hooks import PauseWatch, freeze, warn_of_long

__all__ = ["PauseWatch", "freeze", "warn_of_long"]
