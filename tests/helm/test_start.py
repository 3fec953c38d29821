"""start.sh: the environment that the preflight found, and who does what in a group."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from millrace_chart.render import CHART

SCRIPT = CHART / "files" / "start.sh"
SAY = "import os, sys; print('worker', sys.argv[1:], os.environ.get('UCX_TLS'))"


@pytest.fixture
def pod(tmp_path: Path) -> dict[str, str]:
    """Environment of a pod where `ray` says how it was called, and python3 is ours."""
    tools, modules, shared = tmp_path / "bin", tmp_path / "modules", tmp_path / "run"
    for folder in (tools, modules, shared):
        folder.mkdir()
    (tools / "ray").write_text('#!/bin/sh\necho ray "$@"\n')
    (tools / "find").write_text("#!/bin/sh\n")  # /dev/shm is not ours here
    (tools / "python3").symlink_to(sys.executable)
    for tool in ("ray", "find"):
        (tools / tool).chmod(0o755)
    (modules / "fake_worker.py").write_text(SAY)
    (shared / "fabric.env").write_text("UCX_TLS='^tcp'\n")
    path = f"{tools}:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(modules), "MILLRACE_RUN": str(shared), "RAY_FLAGS": "--num-cpus=8"}


def run(pod: dict[str, str], *arguments: str, **more: str) -> list[str]:
    done = subprocess.run(
        ["sh", str(SCRIPT), *arguments], env={**pod, **more}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_single_pod_is_the_worker(pod: dict[str, str]) -> None:
    assert run(pod, "run", "fake_worker", "--config", "a b") == ["worker ['--config', 'a b'] ^tcp"]


def test_leader_of_a_group_is_rays_head_and_the_worker(pod: dict[str, str]) -> None:
    lines = run(pod, "run", "fake_worker", "--set", "a=b", RAY_PORT="6379", LWS_WORKER_INDEX="0")
    assert lines == [
        "ray start --head --port=6379 --include-dashboard=false --num-cpus=8",
        "worker ['--set', 'a=b'] ^tcp",
    ]


def test_another_pod_joins_the_leader_and_lingers_until_it_has_gone(pod: dict[str, str]) -> None:
    """The leader is found by its address then: a pod that terminates has no name in DNS."""
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = str(leader.getsockname()[1])
        group = {"RAY_PORT": port, "LWS_WORKER_INDEX": "1"}
        joined = run(pod, "run", "fake_worker", LWS_LEADER_ADDRESS="localhost", **group)
        assert joined == [f"ray start --address=127.0.0.1:{port} --block --num-cpus=8"]
        leader.accept()[0].close()
        command = ["sh", str(SCRIPT), "linger"]
        with subprocess.Popen(command, env={**pod, **group, "LWS_LEADER_ADDRESS": "gone.invalid"}) as lingering:
            for _ in range(2):
                leader.accept()[0].close()  # it has asked, and the leader was there
            assert lingering.poll() is None
            leader.close()
            assert lingering.wait() == 0


def test_pod_that_has_not_joined_does_not_linger(pod: dict[str, str]) -> None:
    assert run(pod, "linger", RAY_PORT="1", LWS_LEADER_ADDRESS="gone.invalid") == []


def answers(pod: dict[str, str], codes: list[int]) -> Path:
    """Our python3 asks nobody: it ends with these codes, one per call, and then with 99. The file has what is left."""
    tools, left = Path(pod["PATH"].split(":")[0]), Path(pod["MILLRACE_RUN"]) / "answers"
    left.write_text("".join(f"{code}\n" for code in [*codes, 99]))
    (tools / "python3").unlink()
    script = f"#!/bin/sh\nread -r code <{left}; sed -i 1d {left}; echo 10.0.0.1; exit $code\n"
    for name, text in {"python3": script, "sleep": "#!/bin/sh\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return left


@pytest.mark.parametrize("codes", [[3], [0, 4, 4, 0, 3], [0, *[4] * 20], [*[4] * 19, 0, *[4] * 19, 3]])
def test_who_cannot_ask_asks_again_for_a_while(pod: dict[str, str], codes: list[int]) -> None:
    left = answers(pod, codes)
    (Path(pod["MILLRACE_RUN"]) / "leader").write_text("10.0.0.1")
    assert run(pod, "linger", RAY_PORT="1") == []
    assert left.read_text() == "99\n", "it should have ended with the last of these answers, and not before"


def test_name_that_is_not_in_dns_yet_is_waited_for(pod: dict[str, str]) -> None:
    group = {"RAY_PORT": "6379", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "not-yet.invalid"}
    command = ["sh", str(SCRIPT), "run", "fake_worker"]
    with subprocess.Popen(command, env={**pod, **group}, stdout=-1, stderr=-1, text=True) as waiting:
        assert waiting.stdout is not None and waiting.stderr is not None
        assert waiting.stdout.readline() == "waiting for the leader's Ray at not-yet.invalid:6379\n"
        assert waiting.poll() is None
        waiting.kill()
        assert waiting.stderr.readline().startswith("not-yet.invalid:6379: [Errno ")


def test_ipv6_address_has_brackets(pod: dict[str, str]) -> None:
    answers(pod, [0])
    (Path(pod["PATH"].split(":")[0]) / "python3").write_text("#!/bin/sh\necho fd00::1\n")
    group = {"RAY_PORT": "6379", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    assert run(pod, "run", "fake_worker", **group) == ["ray start --address=[fd00::1]:6379 --block --num-cpus=8"]


def test_missing_python_is_an_error_and_not_a_leader_that_is_late(pod: dict[str, str]) -> None:
    tools = Path(pod["PATH"].split(":")[0])
    (tools / "python3").unlink()
    (tools / "rm").symlink_to(shutil.which("rm") or "/bin/rm")
    group = {"PATH": str(tools), "RAY_PORT": "6379", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "localhost"}
    command = [shutil.which("sh") or "/bin/sh", str(SCRIPT), "run", "fake_worker"]
    done = subprocess.run(command, env={**pod, **group}, capture_output=True, text=True)
    assert done.returncode == 127 and "python3" in done.stderr and "waiting" not in done.stdout


def test_new_cache_begins_with_what_the_image_has(pod: dict[str, str], tmp_path: Path) -> None:
    (image := tmp_path / "image" / "triton").mkdir(parents=True)
    (image / "kernel").write_text("compiled")
    cache = tmp_path / "volume" / "0.1.0"
    more = {"MILLRACE_COMPILED": str(image.parent), "MILLRACE_CACHE": str(cache), "POD_NAME": "pod-0"}
    assert run(pod, "run", "fake_worker", **more) == ["worker [] ^tcp"], "no volume: the worker compiles"
    (cache.parent / "0.1.0.pod-0").mkdir(parents=True)  # of a container that was killed
    for text in ("compiled", "of a pod"):
        run(pod, "run", "fake_worker", **more)
        assert (cache / "triton" / "kernel").read_text() == text and list(cache.parent.iterdir()) == [cache]
        (cache / "triton" / "kernel").write_text("of a pod")
