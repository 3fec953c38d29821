"""python -m millrace_router --config FILE --set key=value --announce FILE"""

import os
import sys

if __name__ == "__main__":
    from millrace_common.process_start import prepare

    prepare(os.environ)

    from millrace_router.main import main

    sys.exit(main())
