"""Runs kubectl, helm and docker. Nothing is decided here."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from millrace_chart.render import CHART, find_helm

LAST = 15  # lines of what a failed command said


class Failed(Exception):
    """A step failed; the message is the reason, for people."""


@dataclass(frozen=True)
class Cluster:
    """One context and namespace. `timeout`: seconds that one wait may take."""

    context: str
    namespace: str
    timeout: int

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return run([binary("kubectl"), "--context", self.context, "--namespace", self.namespace, *arguments], stdin)

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """The objects that `kubectl get` finds."""
        found = json.loads(self.kubectl("get", *arguments, "--output", "json"))
        return list(found["items"]) if "items" in found else [found]

    def helm(self, *arguments: str) -> str:
        return run([binary("helm"), "--kube-context", self.context, "--namespace", self.namespace, *arguments])

    def install(self, release: str, *arguments: str) -> None:
        """Installs or upgrades, and waits until all is ready."""
        self.helm("upgrade", release, str(CHART), "--install", "--wait", "--timeout", f"{self.timeout}s", *arguments)
        self.settled(release)

    def settled(self, release: str) -> None:
        """Waits until no Deployment of the release is being rolled out. Helm lets those be that have one pod less."""
        for found in self.get("deployment", "--selector", f"app.kubernetes.io/instance={release}"):
            name = f"deployment/{found['metadata']['name']}"
            self.kubectl("rollout", "status", name, f"--timeout={self.timeout}s")

    def test(self, release: str) -> None:
        self.helm("test", release, "--logs", "--timeout", f"{self.timeout}s")


def binary(name: str) -> str:
    """Failed where there is none."""
    found = shutil.which(name) or (find_helm() if name == "helm" else None)
    if found is None:
        raise Failed(f"there is no {name} on the PATH")
    return str(found)


def run(command: list[str], stdin: str = "") -> str:
    """What it printed; Failed with the last that it said where it ends badly."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-LAST:]
        raise Failed("\n".join([f"{' '.join(command)}: exit status {done.returncode}", *said]))
    return done.stdout
