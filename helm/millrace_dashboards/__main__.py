"""`python -m millrace_dashboards`: write dashboards and alerts into the chart."""

import argparse
from dataclasses import fields
from pathlib import Path

from millrace_dashboards.alert import RUNBOOKS, Deployment, Thresholds
from millrace_dashboards.files import OUT, rendered, write


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="millrace_dashboards", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--runbooks", default=RUNBOOKS, metavar="URL", help="URL of the runbooks that alerts link")
    parser.add_argument("--namespace", default=Deployment().namespace, help="the deployment's; the chart fills it in")
    parser.add_argument("--model", default=Deployment().model, help="model's name in the API; the chart fills it in")
    parser.add_argument("--release", default=Deployment().release, help="Helm release; the chart fills it in")
    parser.add_argument("--grafana", default="", metavar="URL", help="URL of Grafana, to which alerts link")
    for field in fields(Thresholds):
        kind = str if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = parser.parse_args(argv)
    thresholds = Thresholds(**{field.name: getattr(arguments, field.name) for field in fields(Thresholds)})
    of = Deployment(arguments.namespace, arguments.model, arguments.release)
    write(rendered(thresholds, arguments.runbooks, of, arguments.grafana), arguments.out)


if __name__ == "__main__":
    main()
