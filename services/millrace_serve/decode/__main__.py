"""`python -m millrace_serve.decode --config FILE --set a.b=c --announce FILE`; `--set role=unified` makes a unified
worker.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    from millrace_serve.decode.service import DecodeRole  # rank processes import this file and must not run it
    from millrace_serve.engine.config import Role
    from millrace_serve.worker.main import main as worker_main

    return worker_main(DecodeRole, (Role.DECODE, Role.UNIFIED), os.environ, argv)


if __name__ == "__main__":
    sys.exit(main())
