"""The steps, in order. Each returns what it found in words, and raises Failed with the reason."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace_chart.render import CHART, presets

from millrace_cluster import decide
from millrace_cluster.tools import Cluster, Failed, binary, run

HERE = Path(__file__).parent
GROUPS = HERE / "groups.yaml"
PAIRS, GROUP = "pairs", "groups"  # releases
TWO = ("workerDefaults.replicas=2", "router.replicas=2")  # one goes while the other serves
CHANGED = (*TWO, "workerDefaults.config.timeouts.lease=31", "router.podAnnotations.changed=yes")
PAUSE_S = 2.0


@dataclass(frozen=True)
class Settings:
    """`values`: files for every release. `skip`: names of steps."""

    cluster: Cluster
    registry: str = ""
    values: tuple[Path, ...] = ()
    skip: tuple[str, ...] = ()

    def arguments(self, *files: Path, sets: tuple[str, ...] = ()) -> list[str]:
        """Of helm, for a release."""
        registry = (f"images.registry={self.registry}",) if self.registry else ()
        made = [part for file in (*files, *self.values) for part in ("--values", str(file))]
        return [*made, *(part for item in (*registry, *sets) for part in ("--set", item))]


def accepted(settings: Settings) -> str:
    """The API server checks every preset, and what the next steps install, without storing anything."""
    cluster = settings.cluster
    files = [CHART / "presets" / f"{name}.yaml" for name in presets()]
    files += [] if "groups" in settings.skip else [GROUPS]
    server = decide.version(cluster.kubectl("version", "--output", "json"))
    for file in files:
        registry = () if settings.registry else ("images.registry=registry.example",)
        arguments = settings.arguments(file, sets=registry)
        text = cluster.helm("template", "check", str(CHART), "--kube-version", server, *arguments)
        cluster.kubectl("apply", "--dry-run=server", "--filename", "-", stdin=text)
    return f"{len(files)} renders"


def pairs(settings: Settings) -> str:
    settings.cluster.install(PAIRS, *settings.arguments())
    settings.cluster.test(PAIRS)
    return "installed, helm test passed"


def rollout(settings: Settings) -> str:
    """Every worker and router is replaced while clients stream."""
    cluster = settings.cluster
    cluster.install(PAIRS, *settings.arguments(sets=TWO))
    (router,) = cluster.get("deployment", "--selector", _of(PAIRS, "router"))
    url = decide.address(cluster.get("service", "--selector", _of(PAIRS, "router")))
    objects = decide.load(router, url, (HERE / "load.py").read_text())
    cluster.kubectl("apply", "--filename", "-", stdin=json.dumps(objects))
    pod, timeout = f"pod/{decide.LOAD}", f"--timeout={cluster.timeout}s"
    try:
        cluster.kubectl("wait", pod, "--for=condition=Ready", timeout)
        old = {it["metadata"]["uid"] for it in _pods(cluster, PAIRS)}
        cluster.install(PAIRS, *settings.arguments(sets=CHANGED))
        stayed = [it["metadata"]["name"] for it in _pods(cluster, PAIRS) if it["metadata"]["uid"] in old]
        cluster.kubectl("exec", decide.LOAD, "--", "touch", "/tmp/stop")
        cluster.kubectl("wait", pod, "--for=jsonpath={.status.phase}=Succeeded", timeout)
        found = decide.verdict(cluster.kubectl("logs", decide.LOAD))
    finally:
        cluster.kubectl("delete", pod, f"configmap/{decide.LOAD}", "--ignore-not-found", "--grace-period=1")
    if stayed:
        raise Failed(f"pods that were not replaced: {', '.join(sorted(stayed))}")
    return found


def node(settings: Settings) -> str:
    """A node with workers is lost; the others take over."""
    cluster = settings.cluster
    before = _pods(cluster, PAIRS)
    lost = decide.node_to_lose(cluster.get("nodes"), before)
    with _without(cluster, lost, decide.on(lost, before)):
        began = time.monotonic()
        while (count := decide.ready(_pods(cluster, PAIRS), lost)) < len(before):
            if time.monotonic() - began > cluster.timeout:
                raise Failed(f"without {lost}, {count} of {len(before)} workers and routers are READY")
            time.sleep(PAUSE_S)
        seconds = time.monotonic() - began
        cluster.test(PAIRS)
    return f"without {lost}: all READY again after {seconds:.0f} s, helm test passed"


@contextlib.contextmanager
def _without(cluster: Cluster, name: str, pods: list[str]) -> Iterator[None]:
    """A node of kind is stopped; another is closed, and its pods are deleted by force."""
    waits = f"--timeout={cluster.timeout}s"
    if cluster.context.startswith("kind-"):
        run([binary("docker"), "stop", name])
        try:
            cluster.kubectl("wait", f"node/{name}", "--for=condition=Ready=Unknown", waits)
            yield
        finally:
            run([binary("docker"), "start", name])
            cluster.kubectl("wait", f"node/{name}", "--for=condition=Ready", waits)
        return
    cluster.kubectl("cordon", name)
    try:
        cluster.kubectl("delete", "pod", *pods, "--force", "--grace-period=0")
        yield
    finally:
        cluster.kubectl("uncordon", name)


def groups(settings: Settings) -> str:
    """A worker of two pods, by LeaderWorkerSet and Ray."""
    cluster = settings.cluster
    cluster.install(GROUP, *settings.arguments(GROUPS))
    selector = f"{decide.INSTANCE}={GROUP}"
    waits = f"--timeout={cluster.timeout}s"
    cluster.kubectl("wait", "leaderworkerset", "--selector", selector, "--for=condition=Available", waits)
    cluster.test(GROUP)
    return "installed, helm test passed"


def uninstall(settings: Settings, before: list[decide.Object]) -> str:
    """Nothing is left but what Helm keeps by rule."""
    cluster = settings.cluster
    for release in cluster.helm("list", "--all", "--short").split():
        cluster.helm("uninstall", release, "--wait", "--timeout", f"{cluster.timeout}s")
    deadline = time.monotonic() + cluster.timeout
    while True:
        left, kept = decide.left_behind(before, everything(cluster))
        if not left:
            return f"nothing left; kept by Helm: {', '.join(kept)}" if kept else "nothing left"
        if time.monotonic() > deadline:
            raise Failed(f"left behind: {', '.join(left)}")
        time.sleep(PAUSE_S)


def everything(cluster: Cluster) -> list[decide.Object]:
    """All objects of the namespace."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--namespaced", "--output", "name")
    return cluster.get(decide.listed(kinds))


def _of(release: str, component: str) -> str:
    return f"{decide.INSTANCE}={release},{decide.COMPONENT}={component}"


def _pods(cluster: Cluster, release: str) -> list[decide.Object]:
    """Workers and routers that are not going."""
    found = cluster.get("pods", "--selector", f"{decide.INSTANCE}={release}")
    return [pod for pod in found if decide.serves(pod)]


STEPS: dict[str, Callable[[Settings], str]] = {
    "accepted": accepted,
    "pairs": pairs,
    "rollout": rollout,
    "node": node,
    "groups": groups,
}
FIRST, LAST = "pairs", "uninstall"  # that stores something; that removes it
