"""A worker that waits long for the offer of a prefix fetch: `python -m millrace_testing.patient_worker ROLE
ARGUMENTS…`.

On a busy machine a source's answer may take longer than a prefill worker waits for it.
"""

import runpy
import sys

PATIENCE_S = 30.0

if __name__ == "__main__":  # rank processes import this file and must not run it
    from millrace_serve.handover import prefix_fetches

    prefix_fetches.OFFER_S = PATIENCE_S
    role = sys.argv.pop(1)
    runpy.run_module(f"millrace_serve.{role}.__main__", run_name="__main__")
