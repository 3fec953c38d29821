"""What every process does before it imports anything else. Standard library only.

SIGTERM: the kernel drops a signal without a handler for the first process of a container, PID 1. Imports take seconds,
so a pod that is deleted meanwhile would otherwise wait for its whole grace period.

Core dumps: a file with a process's memory would have prompts, KV pages and keys. Its children inherit the limit.

gRPC's C++ core writes to stderr itself, a line per connection that goes wrong, past the logging of Python (log.py).
"""

import resource
import signal
import sys
from collections.abc import MutableMapping


def prepare(environ: MutableMapping[str, str], code: int = 0) -> None:
    """Make SIGTERM raise SystemExit with `code`, until somebody sets another handler. Leave no core dumps, and have
    gRPC's core write nothing unless GRPC_VERBOSITY says so. `environ`: the process's own.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
    no_core_dumps()
    environ.setdefault("GRPC_VERBOSITY", "NONE")


def no_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
