"""`make cluster-test CONTEXT=...`. Exit status 0: all steps passed; 1: one did not; 2: called wrongly."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from millrace_cluster import decide, steps
from millrace_cluster.tools import Cluster, Failed

NAMES = (*steps.STEPS, steps.LAST)
app = typer.Typer(add_completion=False)


class Report:
    """Prints a row per step. After the first failure no further step starts."""

    def __init__(self) -> None:
        self.table = Table("step", "result", "seconds", "what")
        self.failed = False

    def step(self, name: str, action: Callable[[], str], skip: bool) -> None:
        if skip or self.failed:
            self.table.add_row(name, "skipped", "", "as asked" if skip else "after a failure")
            return
        began = time.monotonic()
        try:
            result, what = "passed", action()
        except Failed as error:
            result, what, self.failed = "FAILED", str(error), True
        self.table.add_row(name, result, f"{time.monotonic() - began:.0f}", what)
        sys.stderr.write(f"{name}: {result}\n")


@app.command()
def main(
    context: Annotated[str, typer.Option(help="context of kubectl; no default, which could be a wrong cluster")],
    registry: Annotated[str, typer.Option(help="images.registry of the chart; empty: images are on the nodes")] = "",
    namespace: Annotated[str, typer.Option(help="namespace to make and delete")] = "millrace-cluster-test",
    values: Annotated[list[Path] | None, typer.Option(help="further values files for all releases")] = None,
    skip: Annotated[list[str] | None, typer.Option(help=f"step to leave out: {', '.join(NAMES)}")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="seconds that one wait may take")] = 1200,
    keep: Annotated[bool, typer.Option(help="leave everything in place after a failure")] = False,
) -> None:
    """Install, test, roll out under load, lose a node, uninstall: on the cluster of --context."""
    unknown = sorted(set(skip or ()) - set(NAMES))
    if not context or unknown:
        without = "CONTEXT=... is needed, one of `kubectl config get-contexts`"
        typer.echo(f"no such step: {', '.join(unknown)}" if unknown else without, err=True)
        raise typer.Exit(2)
    cluster = Cluster(context, namespace, timeout)
    settings = steps.Settings(cluster, registry, tuple(values or ()), tuple(skip or ()))
    report = Report()
    report.step("namespace", partial(_prepare, cluster), skip=False)
    if not report.failed:
        _run(report, settings)
        if report.failed:
            _explain(cluster)
        if report.failed and keep:
            typer.echo(f"kept: namespace {namespace} of {context}", err=True)
        else:
            report.failed = _clean(cluster) or report.failed
    Console(width=None if sys.stdout.isatty() else 160).print(report.table)
    raise typer.Exit(1 if report.failed else 0)


def _run(report: Report, settings: steps.Settings) -> None:
    before: list[decide.Object] = []

    def inventory() -> str:
        before.extend(steps.everything(settings.cluster))
        return f"{len(before)} objects before"

    for name, action in steps.STEPS.items():
        if name == steps.FIRST:
            report.step("inventory", inventory, skip=False)
        report.step(name, partial(action, settings), skip=name in settings.skip)
    report.step(steps.LAST, partial(steps.uninstall, settings, before), skip=steps.LAST in settings.skip)


def _prepare(cluster: Cluster) -> str:
    decide.check_free(cluster.get("namespace", "--field-selector", f"metadata.name={cluster.namespace}"))
    cluster.kubectl("create", "--filename", "-", stdin=json.dumps(decide.namespace(cluster.namespace)))
    return "made"


def _explain(cluster: Cluster) -> None:
    """Print pods and events, which explain most failures."""
    for arguments in (("get", "pods", "--output", "wide"), ("get", "events", "--sort-by=.lastTimestamp")):
        try:
            typer.echo("\n".join(cluster.kubectl(*arguments).splitlines()[-30:]), err=True)
        except Failed as error:
            typer.echo(str(error), err=True)


def _clean(cluster: Cluster) -> bool:
    """Delete the namespace; return whether that failed."""
    try:
        cluster.kubectl("delete", "namespace", cluster.namespace, f"--timeout={cluster.timeout}s")
    except Failed as error:
        typer.echo(str(error), err=True)
        return True
    return False


if __name__ == "__main__":
    app()
