"""Run kubectl, helm and docker."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from millrace_chart.render import CHART, find_helm

LAST = 15  # lines of a failed command's output that its error shows


class Failed(Exception):
    """A step failed; the message is the reason."""


@dataclass(frozen=True)
class Cluster:
    """One context and namespace. `timeout` is the longest wait in seconds."""

    context: str
    namespace: str
    timeout: int

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return run([binary("kubectl"), "--context", self.context, "--namespace", self.namespace, *arguments], stdin)

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the objects that `kubectl get` finds."""
        found = json.loads(self.kubectl("get", *arguments, "--output", "json"))
        return list(found["items"]) if "items" in found else [found]

    def helm(self, *arguments: str) -> str:
        return run([binary("helm"), "--kube-context", self.context, "--namespace", self.namespace, *arguments])

    def install(self, release: str, *arguments: str) -> None:
        """Install or upgrade a release, and wait until all of it is ready."""
        self.helm("upgrade", release, str(CHART), "--install", "--wait", "--timeout", f"{self.timeout}s", *arguments)
        self.settled(release)

    def settled(self, release: str) -> None:
        """Wait until no Deployment of the release is being rolled out. Helm accepts one missing pod."""
        for found in self.get("deployment", "--selector", f"app.kubernetes.io/instance={release}"):
            name = f"deployment/{found['metadata']['name']}"
            self.kubectl("rollout", "status", name, f"--timeout={self.timeout}s")

    def test(self, release: str) -> None:
        self.helm("test", release, "--logs", "--timeout", f"{self.timeout}s")


def binary(name: str) -> str:
    """Return the path of a program. Raises Failed if there is none."""
    found = shutil.which(name) or (find_helm() if name == "helm" else None)
    if found is None:
        raise Failed(f"there is no {name} on the PATH")
    return str(found)


def run(command: list[str], stdin: str = "") -> str:
    """Run a command and return its output. Raises Failed with the last lines of the output if the command fails."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-LAST:]
        raise Failed("\n".join([f"{' '.join(command)}: exit status {done.returncode}", *said]))
    return done.stdout
