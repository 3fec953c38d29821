"""A worker with other versions of its interfaces: `python -m millrace_testing.versioned_worker ROLE ARGUMENTS…`.

$MILLRACE_VERSIONS is added to each of them, as {"KV_PROTOCOL": 1}. Rank processes import this file, and add it too.
"""

import json
import os
import runpy
import sys

from millrace_common import versions

for name, more in json.loads(os.environ["MILLRACE_VERSIONS"]).items():
    setattr(versions, name, getattr(versions, name) + more)

if __name__ == "__main__":
    role = sys.argv.pop(1)
    runpy.run_module(f"millrace_serve.{role}.__main__", run_name="__main__")
