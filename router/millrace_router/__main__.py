"""python -m millrace_router --config FILE --set key=value --announce FILE"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from millrace_common.early_signals import exit_on_sigterm

    exit_on_sigterm()

    from millrace_router.main import main

    sys.exit(main())
