"""`make cluster-test`: what it calls and when it fails, with a kubectl, helm and docker that only play their parts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from millrace_chart.render import ROOT, objects, template
from millrace_cluster import decide, load, steps, tools
from millrace_cluster.__main__ import app
from millrace_cluster.tools import Failed
from millrace_testing import kube_schema
from millrace_testing.charts import of_kind, pods
from typer.testing import CliRunner


def rule(words: str, out: Any = "", error: str = "", status: int = 0, after: str = "") -> dict[str, Any]:
    text = out if isinstance(out, str) else json.dumps(out)
    return {"words": words.split(), "out": text, "error": error, "status": status, "after": after}


def items(*found: dict[str, Any]) -> dict[str, Any]:
    return {"items": list(found)}


def pod(name: str, component: str, node: str) -> dict[str, Any]:
    labels = {decide.COMPONENT: component}
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    meta = {"name": name, "uid": name, "labels": labels}
    return {"kind": "Pod", "metadata": meta, "spec": {"nodeName": node}, "status": status}


def node(name: str, *, ready: str = "True", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def good_log(failed: int = 0, *reasons: str) -> str:
    return "a line before\n" + json.dumps({"sent": 40, "failed": failed, "reasons": reasons})


OLD = [pod("router-1", "router", "a"), pod("prefill-1", "prefill", "b"), pod("decode-1", "decode", "b")]
NEW = [pod("router-2", "router", "a"), pod("prefill-2", "prefill", "b"), pod("decode-2", "decode", "b")]
MOVED = [NEW[0], pod("prefill-3", "prefill", "a"), pod("decode-3", "decode", "a")]
ROUTER = {
    "kind": "Deployment",
    "metadata": {"name": "pairs-millrace-router"},
    "spec": {"template": {"spec": {"securityContext": {}, "containers": [{"name": "router", "image": "r:1"}]}}},
}
SERVICE = {
    "metadata": {"name": "pairs-millrace-router"},
    "spec": {"clusterIP": "10.0.0.1", "ports": [{"name": "grpc", "port": 1}, {"name": "http", "port": 8000}]},
}
RULES = [
    rule("kubectl version", {"serverVersion": {"gitVersion": "v1.33.2-gke.1"}}),
    rule("kubectl api-resources", "configmaps\nevents\npods\n"),
    rule("kubectl get configmaps,pods", items()),
    rule("kubectl get namespace", items()),
    rule("kubectl get deployment", items(ROUTER)),
    rule("kubectl get service", items(SERVICE)),
    rule("kubectl get nodes", items(node("a"), node("b"))),
    rule("kubectl get pods json", items(*MOVED), after="cordon"),
    rule("kubectl get pods json", items(*MOVED), after='"docker", "stop"'),
    rule("kubectl get pods json", items(*NEW), after="timeouts.lease=31"),
    rule("kubectl get pods json", items(*OLD)),
    rule("kubectl logs", good_log()),
    rule("helm list", "pairs\ngroups\n"),
    rule("helm template", "kind: List\n"),
]


@dataclass
class Stage:
    """A PATH with players, which are not started: `run` plays all parts, and writes down what was called."""

    folder: Path
    rules: list[dict[str, Any]] = field(default_factory=list)
    called: list[list[str]] = field(default_factory=list)

    def play(self, *options: str, context: str = "there") -> Result:
        path = {"PATH": f"{self.folder}:/usr/bin:/bin"}
        return CliRunner().invoke(app, ["--context", context, "--timeout", "1", *options], env=path)

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """The answer of the first rule whose words are all in the command, and whose `after` was called before."""
        assert Path(command[0]).parent == self.folder
        words, before = [Path(command[0]).name, *command[1:]], "\n".join(map(json.dumps, self.called))
        self.called.append(words)
        fitting = (it for it in (*self.rules, *RULES) if set(it["words"]) <= set(words) and it["after"] in before)
        found = next(fitting, rule(""))
        return subprocess.CompletedProcess(command, found["status"], found["out"], found["error"])

    def calls(self) -> list[list[str]]:
        """Without the options that all have."""
        assert all("there" in words or words[0] == "docker" or "kind-k" in words for words in self.called)
        return [[words[0], *words[5:]] for words in self.called]

    def said(self, *words: str) -> bool:
        return any(set(words) <= set(call) for call in self.calls())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    for name in ("kubectl", "helm", "docker"):
        (tmp_path / name).touch(mode=0o755)
    made = Stage(tmp_path)
    monkeypatch.setattr(tools, "subprocess", SimpleNamespace(run=made.run))
    return made


def test_a_command_gets_its_input_and_fails_with_its_last_words() -> None:
    assert tools.run(["cat"], "manifests") == "manifests"
    with pytest.raises(Failed) as failed:
        tools.run(["sh", "-c", "seq 100 >&2; exit 3"])
    first, *said = str(failed.value).splitlines()
    assert first.endswith("exit status 3") and said == [str(i) for i in range(101 - tools.LAST, 101)]
    with pytest.raises(Failed, match="only this"):
        tools.run(["sh", "-c", "echo only this; exit 1"])


def test_everything_passes(stage: Stage) -> None:
    done = stage.play("--registry", "reg.example")
    assert done.exit_code == 0, done.stderr
    assert "40 requests, none failed" in done.stdout and "FAILED" not in done.stdout
    calls = stage.calls()
    for step in ("accepted", "pairs", "rollout", "node", "groups", "uninstall"):
        assert f"{step}: passed" in done.stderr
    installs = [call for call in calls if "upgrade" in call]
    assert [call[2] for call in installs] == ["pairs", "pairs", "pairs", "groups"]
    assert all("images.registry=reg.example" in call and "--wait" in call for call in installs)
    assert sum("test" in call for call in calls) == 3  # pairs, without a node, groups
    assert ["kubectl", "cordon", "b"] in calls and ["kubectl", "uncordon", "b"] in calls
    (killed,) = (call for call in calls if "--force" in call)
    assert {"prefill-2", "decode-2"} <= set(killed) and "router-2" not in killed
    assert [call[2] for call in calls if "uninstall" in call] == ["pairs", "groups"]
    assert calls[-1][:4] == ["kubectl", "delete", "namespace", "millrace-cluster-test"]


def test_the_api_server_checks_every_preset_for_its_own_version(stage: Stage) -> None:
    assert stage.play("--skip", "rollout", "--skip", "node").exit_code == 0
    renders = [call for call in stage.calls() if "template" in call]
    assert all("1.33.2" in call for call in renders)
    assert {Path(word).stem for call in renders for word in call if word.endswith(".yaml")} == {
        *(path.stem for path in (ROOT / "helm" / "millrace" / "presets").glob("*.yaml")),
        "groups",
    }
    assert sum("--dry-run=server" in call for call in stage.calls()) == len(renders)


def test_a_node_of_kind_is_stopped_and_started(stage: Stage) -> None:
    assert stage.play(context="kind-k").exit_code == 0
    assert [call for call in stage.called if call[0] == "docker"] == [["docker", "stop", "b"], ["docker", "start", "b"]]
    assert not stage.said("cordon")


def test_it_does_not_run_without_a_context(stage: Stage) -> None:
    done = stage.play(context="")
    assert done.exit_code == 2 and "CONTEXT=..." in done.stderr
    assert not stage.called


def test_an_unknown_step_is_refused(stage: Stage) -> None:
    done = stage.play("--skip", "nodes")
    assert done.exit_code == 2 and "no such step: nodes" in done.stderr


@pytest.mark.parametrize(
    ("broken", "step", "said"),
    [
        (rule("helm template", error="values are wrong", status=1), "accepted", "values are wrong"),
        (rule("kubectl --dry-run=server", error="no matches for kind", status=1), "accepted", "no matches for kind"),
        (rule("helm upgrade pairs", error="timed out waiting", status=1), "pairs", "timed out waiting"),
        (rule("helm test pairs", error="pod failed", status=1), "pairs", "pod failed"),
        (rule("kubectl rollout", error="exceeded its progress", status=1), "pairs", "exceeded its progress"),
        (rule("kubectl logs", good_log(2, "HTTPError: 503")), "rollout", "2 of 40 requests failed: HTTPError: 503"),
        (rule("kubectl logs", "Traceback"), "rollout", "nothing that can be read"),
        (rule("kubectl get nodes", items(node("a"))), "node", "two nodes that take pods"),
        (rule("kubectl wait leaderworkerset", error="timed out", status=1), "groups", "timed out"),
        (rule("helm uninstall", error="in use", status=1), "uninstall", "in use"),
    ],
)
def test_a_failure_has_its_reason_and_ends_the_run(stage: Stage, broken: dict[str, Any], step: str, said: str) -> None:
    stage.rules = [broken]
    done = stage.play()
    assert done.exit_code == 1
    assert f"{step}: FAILED" in done.stderr and said in " ".join(done.stdout.split())
    assert stage.said("delete", "namespace"), "it cleans up all the same"
    assert stage.said("get", "events"), "and shows what happened"


def test_pods_that_were_not_replaced_fail_the_rollout(stage: Stage) -> None:
    stage.rules = [rule("kubectl get pods json", items(*OLD))]
    done = stage.play()
    assert "rollout: FAILED" in done.stderr and "decode-1, prefill-1, router-1" in " ".join(done.stdout.split())


def test_workers_that_do_not_come_back_fail_the_node(stage: Stage) -> None:
    stage.rules = [rule("kubectl get pods json", items(*MOVED[:2], NEW[2]), after="cordon")]
    done = stage.play("--skip", "rollout")
    assert "without b, 2 of 3 workers and routers are READY" in " ".join(done.stdout.split())


def test_a_node_comes_back_after_a_failure(stage: Stage) -> None:
    stage.rules = [rule("kubectl --force", error="forbidden", status=1)]
    done = stage.play()
    assert "node: FAILED" in done.stderr and stage.said("uncordon", "b")


def test_what_is_left_behind_fails(stage: Stage) -> None:
    left = {"kind": "Secret", "metadata": {"name": "ray"}}
    stage.rules = [rule("kubectl get configmaps,pods", items(left), after="uninstall")]
    done = stage.play("--skip", "rollout", "--skip", "node")
    assert done.exit_code == 1 and "left behind: Secret/ray" in " ".join(done.stdout.split())


def test_keep_leaves_everything_after_a_failure_only(stage: Stage) -> None:
    stage.rules = [rule("helm test pairs", error="pod failed", status=1)]
    assert "kept: namespace" in stage.play("--keep").stderr
    assert not stage.said("delete", "namespace")
    stage.rules = []
    assert stage.play("--keep", "--skip", "rollout", "--skip", "node").exit_code == 0 and stage.said(
        "delete", "namespace"
    )


@pytest.mark.parametrize(("labels", "said"), [({}, "not of this test"), (decide.OURS, "left by an earlier run")])
def test_a_namespace_that_is_there_is_not_touched(stage: Stage, labels: dict[str, str], said: str) -> None:
    stage.rules = [rule("kubectl get namespace", items({"metadata": {"name": "prod", "labels": labels}}))]
    done = stage.play("--namespace", "prod")
    assert done.exit_code == 1 and said in " ".join(done.stdout.split())
    assert not stage.said("delete") and not stage.said("upgrade") and not stage.said("create")


def test_which_node_is_lost() -> None:
    taint = {"key": "control-plane", "effect": "NoSchedule"}
    closed = [node("c", taints=[taint]), node("d", unschedulable=True), node("e", ready="Unknown")]
    nodes = [node("a"), node("b"), *closed]
    found = [pod("r", "router", "a"), pod("p", "prefill", "a"), pod("d", "decode", "b"), pod("x", "decode", "b")]
    assert decide.node_to_lose(nodes, found) == "b"
    with pytest.raises(Failed, match="two nodes that take pods are needed, here: a;"):
        decide.node_to_lose([node("a"), *closed], found)
    with pytest.raises(Failed, match="no worker runs"):
        decide.node_to_lose(nodes, [])


def test_what_helm_leaves_on_purpose_is_named() -> None:
    def item(name: str, **notes: str) -> dict[str, Any]:
        return {"kind": "Pod", "metadata": {"name": name, "annotations": notes}}

    hook = item("test", **{"helm.sh/hook": "test"})
    kept = item("claim", **{"helm.sh/resource-policy": "keep"})
    assert decide.left_behind([item("old")], [item("old"), item("new"), hook, kept]) == (
        ["Pod/new"],
        ["Pod/claim", "Pod/test"],
    )


@pytest.mark.helm
def test_the_releases_render_and_are_valid() -> None:
    found = objects(template((steps.GROUPS,), (*steps.CHANGED,)))
    (group,) = of_kind(found, "LeaderWorkerSet")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert group["spec"]["replicas"] == 2
    for item in found:
        assert kube_schema.check(item) == []


@pytest.mark.helm
def test_the_changed_release_replaces_every_pod() -> None:
    """Without values files, as the roll-out installs it; and each Deployment has two pods before."""
    before, after = (objects(template((), sets)) for sets in (steps.TWO, steps.CHANGED))
    old, new = (
        {it["metadata"]["name"]: it["spec"]["template"] for it in of_kind(items, "Deployment")}
        for items in (before, after)
    )
    assert len(old) == 3 and all(old[name] != new[name] for name in old)
    assert {item["spec"]["replicas"] for item in of_kind(before, "Deployment")} == {2}


@pytest.mark.helm
def test_the_load_is_valid_and_uses_the_routers_image() -> None:
    made = objects(template(()))
    (router,) = (it for it in of_kind(made, "Deployment") if it["metadata"]["name"].endswith("-router"))
    url = decide.address(of_kind(made, "Service"))
    assert url == "http://demo-millrace-router:8000"
    found = decide.load(router, url, "pass")["items"]
    for item in found:
        assert kube_schema.check(item) == []
    ((_, spec),) = pods(found)
    assert (
        spec["containers"][0]["image"] == dict(pods(made))["Deployment/demo-millrace-router"]["containers"][0]["image"]
    )


def test_the_steps_are_in_make() -> None:
    command = ["make", "-n", "cluster-test", "CONTEXT=a", "REGISTRY=b"]
    text = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "-m millrace_cluster --context 'a' --registry 'b'" in text.stdout


GOOD = [b"data: {}", b"data: [DONE]"]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server with one answer for all; it says where."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, lines: list[bytes]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"\n\n".join(lines) + b"\n\n")

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "lines", "said"),
    [
        (200, GOOD, ""),
        (503, GOOD, "503"),
        (200, GOOD[:1], "did not end"),
        (200, [b'data: {"error": {}}', *GOOD], "an error within"),
        (200, [], "did not end"),
    ],
)
def test_the_load_takes_only_whole_answers(
    serve: Callable[..., str], status: int, lines: list[bytes], said: str
) -> None:
    assert said in load.request(serve(status, lines), 4)
    assert bool(said) is bool(load.request(serve(status, lines), 4))


def test_the_load_counts_until_it_is_stopped(
    serve: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", serve(200, GOOD), "--folder", str(tmp_path), "--clients", "2"]
    thread = Thread(target=load.main, args=(arguments,))
    thread.start()
    while not (tmp_path / "first").exists():
        assert thread.is_alive()
    (tmp_path / "stop").touch()
    thread.join(10)
    assert decide.verdict(capsys.readouterr().out).endswith("none failed")


def test_a_load_without_a_server_fails() -> None:
    assert "URLError" in load.request("http://127.0.0.1:9", 4)
    with pytest.raises(Failed, match="0 of 0 requests failed: none was sent"):
        decide.verdict(load.Result().text())
