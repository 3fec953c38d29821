"""`make cluster-test`: what it calls and when it fails, with a kubectl, helm and docker that only play their parts."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from millrace_chart.render import objects, template
from millrace_cluster import decide, steps, tools
from millrace_cluster.__main__ import app
from millrace_testing import kube_schema
from millrace_testing.charts import of_kind
from typer.testing import CliRunner


def rule(words: str, out: Any = "", error: str = "", after: str = "") -> dict[str, Any]:
    text = out if isinstance(out, str) else json.dumps(out)
    return {"words": words.split(), "out": text, "error": error, "after": after}


def items(*found: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(found)}


def pod(name: str, node: str) -> dict[str, Any]:
    meta = {"name": name, "uid": name, "labels": {decide.COMPONENT: name.partition("-")[0]}}
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    return {"kind": "Pod", "metadata": meta, "spec": {"nodeName": node}, "status": status}


def node(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


OLD = [pod("router-1", "a"), pod("prefill-1", "b"), pod("decode-1", "b")]
NEW = [pod("router-2", "a"), pod("prefill-2", "b"), pod("decode-2", "b")]
MOVED = [NEW[0], pod("prefill-3", "a"), pod("decode-3", "a")]
POD = {"spec": {"securityContext": {}, "containers": [{"name": "router", "image": "r:1"}]}}
ROUTER = {"kind": "Deployment", "metadata": {"name": "pairs-millrace-router"}, "spec": {"template": POD}}
PORTS = {"clusterIP": "10.0.0.1", "ports": [{"name": "grpc", "port": 1}, {"name": "http", "port": 8000}]}
SENT = {"sent": 40, "failed": 0, "reasons": []}
RULES = [
    rule("kubectl version", {"serverVersion": {"gitVersion": "v1.33.2-gke.1"}}),
    rule("kubectl api-resources", "configmaps\nevents\npods\n"),
    rule("kubectl get configmaps,pods", items()),
    rule("kubectl get namespace", items()),
    rule("kubectl get deployment", items(ROUTER)),
    rule("kubectl get service", items({"metadata": ROUTER["metadata"], "spec": PORTS})),
    rule("kubectl get nodes", items(node("a"), node("b"))),
    rule("kubectl get pods json", items(*MOVED), after="cordon"),
    rule("kubectl get pods json", items(*NEW), after="timeouts.lease=31"),
    rule("kubectl get pods json", items(*OLD)),
    rule("kubectl logs", f"a line before\n{json.dumps(SENT)}"),
    rule("helm list", "pairs\ngroups\n"),
    rule("helm template", "kind: List\n"),
]


@dataclass
class Stage:
    """A PATH with players, which are not started: `run` plays all parts, and writes down what was called."""

    folder: Path
    rules: list[dict[str, Any]] = field(default_factory=list)
    called: list[list[str]] = field(default_factory=list)

    def play(self, *options: str) -> Result:
        path = {"PATH": f"{self.folder}:/usr/bin:/bin"}
        return CliRunner().invoke(app, ["--context", "there", "--timeout", "1", *options], env=path)

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """The answer of the first rule whose words are all in the command, and whose `after` was called before."""
        words, before = [Path(command[0]).name, *command[1:]], "\n".join(map(json.dumps, self.called))
        self.called.append(words)
        fitting = (it for it in (*self.rules, *RULES) if set(it["words"]) <= set(words) and it["after"] in before)
        found = next(fitting, rule(""))
        return subprocess.CompletedProcess(command, int(bool(found["error"])), found["out"], found["error"])

    def said(self, *words: str) -> bool:
        return any(set(words) <= set(call) for call in self.called)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    for name in ("kubectl", "helm", "docker"):
        (tmp_path / name).touch(mode=0o755)
    made = Stage(tmp_path)
    monkeypatch.setattr(tools, "subprocess", SimpleNamespace(run=made.run))
    return made


def test_cluster_test_where_all_is_well_passes_every_step(stage: Stage) -> None:
    done = stage.play("--registry", "reg.example")
    assert done.exit_code == 0 and "40 requests, none failed" in done.stdout, done.stderr
    assert all(f"{step}: passed" in done.stderr for step in (*steps.STEPS, steps.LAST))
    assert sum("upgrade" in call and "--wait" in call for call in stage.called) == 4
    assert stage.said("uncordon", "b") and stage.said("--force", "prefill-2", "decode-2")
    assert {"delete", "namespace", "millrace-cluster-test"} <= set(stage.called[-1])


@pytest.mark.parametrize(
    ("broken", "step", "said"),
    [
        (rule("helm test pairs", error="pod failed"), "pairs", "pod failed"),
        (rule("kubectl logs", json.dumps(SENT | {"failed": 2, "reasons": ["503"]})), "rollout", "2 of 40 requests"),
        (rule("kubectl get pods json", items(*OLD)), "rollout", "decode-1, prefill-1, router-1"),
        (rule("kubectl get nodes", items(node("a"))), "node", "two nodes that take pods"),
        (rule("kubectl get configmaps,pods", items(*OLD), after="uninstall"), "uninstall", "left behind: Pod/decode-1"),
    ],
)
def test_cluster_test_where_a_step_fails_says_why_and_cleans(
    stage: Stage, broken: dict[str, Any], step: str, said: str
) -> None:
    stage.rules = [broken]
    done = stage.play()
    assert done.exit_code == 1 and f"{step}: FAILED" in done.stderr and said in " ".join(done.stdout.split())
    assert stage.said("delete", "namespace") and stage.said("get", "events")


def test_cluster_test_leaves_a_namespace_that_is_there_alone(stage: Stage) -> None:
    stage.rules = [rule("kubectl get namespace", items({"metadata": {"name": "prod", "labels": {}}}))]
    done = stage.play("--namespace", "prod")
    assert done.exit_code == 1 and "not of this test" in " ".join(done.stdout.split())
    assert not stage.said("delete") and not stage.said("upgrade") and not stage.said("create")


@pytest.mark.helm
def test_changed_release_of_the_rollout_replaces_every_pod() -> None:
    before, after = (
        {it["metadata"]["name"]: it["spec"]["template"] for it in of_kind(objects(template((), sets)), "Deployment")}
        for sets in (steps.TWO, steps.CHANGED)
    )
    assert len(before) == 3 and all(before[name] != after[name] for name in before)
    load = decide.load({"spec": {"template": POD}}, "http://a:1", "pass")["items"]
    (group,) = of_kind(objects(template((steps.GROUPS,))), "LeaderWorkerSet")
    assert [problem for item in (*load, group) for problem in kube_schema.check(item)] == []
