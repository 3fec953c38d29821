"""`python -m millrace_dashboards`: write dashboards and alerts into the chart.

--check says which files differ instead and exits with 1.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from millrace_dashboards.alert import RUNBOOKS, Deployment, Thresholds
from millrace_dashboards.files import OUT, differing, rendered, write


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="millrace_dashboards", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--runbooks", default=RUNBOOKS, metavar="URL", help="URL of the runbooks that alerts link")
    parser.add_argument("--namespace", default=Deployment().namespace, help="the deployment's; the chart fills it in")
    parser.add_argument("--model", default=Deployment().model, help="model's name in the API; the chart fills it in")
    parser.add_argument("--release", default=Deployment().release, help="Helm release; the chart fills it in")
    parser.add_argument("--grafana", default="", metavar="URL", help="URL of Grafana, to which alerts link")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    for field in fields(Thresholds):
        kind = str if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = parser.parse_args(argv)
    thresholds = Thresholds(**{field.name: getattr(arguments, field.name) for field in fields(Thresholds)})
    of = Deployment(arguments.namespace, arguments.model, arguments.release)
    files = rendered(thresholds, arguments.runbooks, of, arguments.grafana)
    if not arguments.check:
        write(files, arguments.out)
        return 0
    wrong = differing(files, arguments.out)
    sys.stderr.write("".join(f"{arguments.out / name} is not what `make dashboards` writes\n" for name in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
