"""python -m millrace_router --config FILE --set key=value --announce FILE"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace_common import log
from millrace_common.config import ConfigError, load
from millrace_rpc.server import run

from millrace_router.config import RouterConfig
from millrace_router.main import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="millrace_router")
    parser.add_argument("--config", type=Path, help="YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides the file")
    parser.add_argument("--announce", type=Path, help="file for the bound ports, as JSON")
    arguments = parser.parse_args()
    try:
        config = load(RouterConfig, arguments.config, arguments.set)
        log.setup("router", config.log_level)
        run(serve(config, arguments.announce))
    except (ConfigError, OSError) as error:
        print(f"millrace_router: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
