"""`python -m millrace_serve.prefill --config FILE --set a.b=c --announce FILE`"""

import os
import sys

if __name__ == "__main__":  # rank processes import this file and must not run it
    from millrace_common.process_start import prepare

    prepare(os.environ)

    from millrace_serve.engine.config import Role
    from millrace_serve.handover.role import HandoverRole
    from millrace_serve.worker.main import main

    sys.exit(main(HandoverRole, (Role.PREFILL,), os.environ))
