"""The init container of every pod, on made-up devices."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from millrace_chart.render import CHART, ROOT

SCRIPT = CHART / "files" / "preflight.py"
FREE = resource.RLIM_INFINITY
NICS = ("--nics", "2", "--devices", "mlx5_")


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["preflight"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def device(
    sysfs: Path, name: str, link: str = "Ethernet", state: str = "4: ACTIVE", roce: tuple[int, ...] = (2, 3)
) -> None:
    """One port; `roce` are the indices of its RoCE v2 GIDs, all others are of v1 or empty."""
    port = sysfs / "class" / "infiniband" / name / "ports" / "1"
    for index in range(5):
        (port / "gids").mkdir(parents=True, exist_ok=True)
        (port / "gid_attrs" / "types").mkdir(parents=True, exist_ok=True)
        empty = index == 4
        gid = "0000:0000:0000:0000:0000:0000:0000:0000" if empty else "0000:0000:0000:0000:0000:ffff:0a00:0001"
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        kind = "RoCE v2" if index in roce or empty else "IB/RoCE v1"
        (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link}\n")


def look(preflight: ModuleType, sysfs: Path, *arguments: str, memlock: int = FREE) -> tuple[list[str], dict[str, str]]:
    return preflight.look(preflight.parse([*NICS, "--sysfs", str(sysfs), *arguments]), memlock)


def test_ethernet_ports_and_their_common_gid(preflight: ModuleType, tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", roce=(1, 2, 3))
    device(tmp_path, "mlx5_1", roce=(1, 3))
    device(tmp_path, "mlx5_bond_0", state="1: DOWN")
    device(tmp_path, "bnxt_re0")
    problems, env = look(preflight, tmp_path, "--link", "Ethernet")
    assert not problems
    assert env == {
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "UCX_TLS": "^tcp",
        "UCX_IB_GID_INDEX": "3",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_IB_GID_INDEX": "3",
    }


def test_the_smallest_common_gid_where_the_usual_one_is_not(preflight: ModuleType, tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", roce=(0, 1, 2))
    device(tmp_path, "mlx5_1", roce=(1, 2))
    assert look(preflight, tmp_path)[1]["UCX_IB_GID_INDEX"] == "1"


def test_infiniband_needs_no_gid(preflight: ModuleType, tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        device(tmp_path, name, link="InfiniBand", roce=())
    device(tmp_path, "mlx5_2", link="Ethernet")  # the management port
    problems, env = look(preflight, tmp_path, "--link", "InfiniBand")
    assert not problems and env["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1" and "UCX_IB_GID_INDEX" not in env


@pytest.mark.parametrize(
    ("states", "roce", "memlock", "message"),
    [
        ((), (), FREE, "needs 2 active ports of mlx5_*, has 0; sees no RDMA device at all"),
        (("4: ACTIVE", "1: DOWN"), (3,), FREE, "has 1; sees mlx5_0:1 (Ethernet, ACTIVE), mlx5_1:1 (Ethernet, DOWN)"),
        (("4: ACTIVE", "4: ACTIVE"), (), FREE, "no GID index is of RoCE v2 on all of mlx5_0:1,mlx5_1:1"),
        (("4: ACTIVE", "4: ACTIVE"), (3,), 65536, "may lock 65536 bytes of memory only: set LimitMEMLOCK=infinity"),
    ],
)
def test_what_is_missing_is_said(
    preflight: ModuleType, tmp_path: Path, states: tuple[str, ...], roce: tuple[int, ...], memlock: int, message: str
) -> None:
    for index, state in enumerate(states):
        device(tmp_path, f"mlx5_{index}", state=state, roce=roce)
    (problem,) = look(preflight, tmp_path, memlock=memlock)[0]
    assert message in problem
    problems, env = look(preflight, tmp_path, "--allow-tcp", memlock=memlock)
    assert not problems and not env  # UCX is told nothing, and uses TCP


def test_the_model_and_the_cache(preflight: ModuleType, tmp_path: Path) -> None:
    def problems(*more: str) -> list[str]:
        options = ["--model", str(tmp_path / "model"), "--writable", str(tmp_path / "cache"), *more]
        return preflight.look(preflight.parse(options), FREE)[0]

    assert [p.split(":")[0].split(" is not")[0] for p in problems()] == [
        f"no checkpoint in {tmp_path / 'model'}",
        str(tmp_path / "cache"),
    ]
    (tmp_path / "cache").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert not problems()
    assert "is not complete" in problems("--marker")[0]
    (tmp_path / "model" / preflight.MARKER).touch()
    assert not problems("--marker")


def test_the_marker_is_the_one_that_the_download_writes(preflight: ModuleType) -> None:
    assert f'touch "$FOLDER/{preflight.MARKER}"' in (CHART / "templates" / "download.yaml").read_text()


def test_it_waits_until_the_pod_can_work(tmp_path: Path) -> None:
    """The process stays, says what is missing, and ends well as soon as it is there."""
    text = SCRIPT.read_text().replace("PAUSES_S = (5.0, 60.0)", "PAUSES_S = (0.05, 0.1)")
    text = text.replace(
        "resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]", "resource.RLIM_INFINITY"
    )  # not this machine's
    script, model, env = tmp_path / "preflight.py", tmp_path / "model", tmp_path / "fabric.env"
    script.write_text(text)
    command = [sys.executable, str(script), "--model", str(model), "--env", str(env), "--sysfs", str(tmp_path), *NICS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "config.json is missing" in process.stdout.readline()
        model.mkdir()
        (model / "config.json").write_text("{}")
        while "no RDMA device" not in process.stdout.readline():
            assert process.poll() is None
        for name in ("mlx5_0", "mlx5_1"):
            device(tmp_path, name)
        while "good: NCCL_IB_GID_INDEX=3" not in process.stdout.readline():
            assert process.poll() is None
        assert process.wait(30) == 0
    shell = ["sh", "-c", f'. {env} && echo "$UCX_TLS $UCX_NET_DEVICES"']
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "^tcp mlx5_0:1,mlx5_1:1\n"


def test_scripts_of_the_chart_need_python_alone() -> None:
    """They run where nothing of ours need be importable."""
    for name in ("preflight.py", "helm_test.py"):
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(CHART / "files" / name), "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0 and "usage" in done.stdout
