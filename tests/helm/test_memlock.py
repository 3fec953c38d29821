"""k8s/prerequisites/memlock: its script, with a stand-in for systemd."""

import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from millrace_chart.render import ROOT

FOLDER = ROOT / "k8s" / "prerequisites" / "memlock"
SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$STATE/calls"
case "$1" in
is-active) [ -f "$STATE/active" ] ;;
show) echo 4242 ;;
daemon-reload) [ ! -f "$ETC"/systemd/system/containerd.service.d/50-*.conf ] || touch "$STATE/reloaded" ;;
restart) [ ! -f "$STATE/reloaded" ] || [ -f "$STATE/stubborn" ] || cp "$STATE/unlimited" "$PROC/4242/limits" ;;
esac
"""
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"


def line(limit: str) -> str:
    return f"{LIMITS}Max locked memory         {limit:<21}{limit:<21}bytes     \n"


def daemon_set() -> dict:
    return yaml.safe_load((FOLDER / "daemonset.yaml").read_text())


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """containerd runs with systemd's usual limit."""
    (tmp_path / "proc" / "4242").mkdir(parents=True)
    (tmp_path / "proc" / "4242" / "limits").write_text(line("8388608"))
    (tmp_path / "unlimited").write_text(line("unlimited"))
    (tmp_path / "active").touch()
    (tmp_path / "calls").touch()
    (tmp_path / "bin").mkdir()
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    return tmp_path


def run(node: Path) -> subprocess.CompletedProcess[str]:
    """As the pod does, but without nsenter."""
    (container,) = daemon_set()["spec"]["template"]["spec"]["initContainers"]
    command = container["command"]
    assert command[: command.index("--")] == ["nsenter", "-t", "1", "-m"]
    folders = {"STATE": node, "ETC": node / "etc", "PROC": node / "proc"}
    return subprocess.run(
        [*command[command.index("--") + 1 :], *container["args"]],
        env={"PATH": f"{node / 'bin'}:{os.environ['PATH']}", **{key: str(value) for key, value in folders.items()}},
        capture_output=True,
        text=True,
    )


def restarts(node: Path) -> int:
    return (node / "calls").read_text().count("restart containerd.service")


def test_runtime_is_restarted_once(node: Path) -> None:
    done = run(node)
    assert done.returncode == 0, done.stderr
    assert "may lock 8388608 bytes: restarting it" in done.stdout and "without limit now" in done.stdout
    drop_in = node / "etc/systemd/system/containerd.service.d/50-millrace-memlock.conf"
    assert drop_in.read_text() == "[Service]\nLimitMEMLOCK=infinity\n"
    again = run(node)
    assert again.returncode == 0 and "nothing to do" in again.stdout and restarts(node) == 1


def test_node_without_limit_is_left_alone(node: Path) -> None:
    (node / "proc" / "4242" / "limits").write_text(line("unlimited"))
    done = run(node)
    assert done.returncode == 0 and "nothing to do" in done.stdout
    assert not restarts(node) and not (node / "etc").exists()


def test_another_runtime_is_left_alone_and_said(node: Path) -> None:
    """Once: a container that fails starts again for ever."""
    (node / "active").unlink()
    done = run(node)
    assert done.returncode == 0 and done.stdout.startswith("no containerd.service runs here, so nothing was changed")
    assert not restarts(node) and not (node / "etc").exists()


def test_limit_that_stays_is_said(node: Path) -> None:
    (node / "stubborn").touch()
    done = run(node)
    assert done.returncode == 1 and "the limit is still 8388608: another drop-in wins" in done.stdout


def test_it_runs_only_where_a_node_is_labelled_for_it() -> None:
    found = daemon_set()
    kubernetes_validate.validate(found, "1.37", strict=True)
    pod = found["spec"]["template"]["spec"]
    (label,) = pod["nodeSelector"].items()
    assert f"{label[0]}={label[1]}" in (FOLDER / "kustomization.yaml").read_text()
    assert found["spec"]["selector"]["matchLabels"].items() <= found["spec"]["template"]["metadata"]["labels"].items()
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["image"].rpartition(":")[2][0].isdigit()
        assert container["securityContext"].get("privileged", False) is (container["name"] == "limit")
    namespace = yaml.safe_load((FOLDER / "namespace.yaml").read_text())["metadata"]
    assert namespace["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    assert found["metadata"]["namespace"] == namespace["name"]
