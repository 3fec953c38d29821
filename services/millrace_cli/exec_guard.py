"""Run a command that cannot outlive its parent: `python exec_guard.py PARENT_PID COMMAND…`.

The kernel sends SIGKILL to this process when the parent dies in whatever way (PR_SET_PDEATHSIG survives exec). A
parent that died before the call is seen by its changed pid. A file of its own, run with `-S`, because it must cost
milliseconds and because code between fork and exec (`preexec_fn`) is unsafe in a process with gRPC threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
