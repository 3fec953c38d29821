"""The init container of every pod, on made-up machines."""

import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from millrace_chart.render import CHART, ROOT
from millrace_testing.rdma_machine import IPV4, IPV6, LOCAL, PREFLIGHT, Machine, load_preflight

NICS = ("--nics", "2", "--devices", "mlx5_")


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    return load_preflight()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(preflight: ModuleType, machine: Machine, *arguments: str) -> tuple[list[str], dict[str, str]]:
    return preflight.look(preflight.parse([*NICS, *machine.options(), *arguments]))


def nic(name: str, **facts: Any) -> tuple[str, dict[str, Any]]:
    return name, facts


BRIDGE, SWITCH = "pci0000:15/0000:15:01.0", "pci0000:15/0000:15:01.0/0000:16:00.0"
NEAR, FAR = f"{BRIDGE}/0000:19:00.0", "pci0000:5f/0000:5f:01.0/0000:60:00.0"
DOWN = "1: DOWN"
PAIR = [nic("mlx5_0"), nic("mlx5_1")]
RAILS = [  # as nvidia-smi says: PIX, PXB, PHB, and another socket
    nic("mlx5_0", path=f"{SWITCH}/0000:17:01.0/0000:19:00.0"),
    nic("mlx5_1", path="pci0000:37/0000:37:01.0/0000:38:01.0/0000:3a:00.0"),
    nic("mlx5_2", path="pci0000:15/0000:15:02.0/0000:1d:00.0"),
    nic("mlx5_3", path=FAR),
]
GPUS = (f"{SWITCH}/0000:17:00.0/0000:18:00.0", "pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:00.0")
INFINIBAND = [nic(name, link="InfiniBand", gids={}) for name in ("mlx5_0", "mlx5_1")]
VM = "LNXSYSTM:00/VMBUS/pci0001:00/0001:00:00.0"
IN_VMS = [nic(f"mlx5_{i}", path=f"LNXSYSTM:00/VMBUS/pci010{i}:00/010{i}:00:02.0") for i in range(3)]
NO_ADDRESS = [nic("mlx5_2", gids={1: LOCAL}), nic("mlx5_3", gids={})]
WITH_ADDRESS = [nic(name, gids={1: LOCAL, 3: IPV4}) for name in ("mlx5_0", "mlx5_1")]
BONDS = [nic("mlx5_0"), nic("mlx5_bond_0"), nic("mlx5_bond_1")]
CHOSEN: dict[str, tuple[list[Any], tuple[str, ...], str, str]] = {  # NICs, arguments, ports, the GID index
    "other vendors": (
        [nic("rocep12s0f0"), nic("bnxt_re0"), nic("rxe0")],
        ("--devices", "mlx5_,roce,bnxt_re"),
        "br",
        "3",
    ),
    "given ones": ([nic("mlx5_0"), nic("mlx5_1", given=False), nic("mlx5_2")], (), "02", "3"),
    "nearest to GPUs": (RAILS, (), "01", "3"),
    "of the same socket": (RAILS, ("--nics", "3"), "012", "3"),
    "of another socket": (RAILS, ("--nics", "4"), "0123", "3"),
    "without distances": (IN_VMS, (), "012", "3"),
    "bonds that are asked for": (BONDS, ("--devices", "mlx5_bond_"), "01", "3"),
    "not excluded": ([nic(f"mlx5_{i}") for i in range(4)], ("--exclude", "mlx5_0,mlx5_2"), "13", "3"),
    "InfiniBand": ([*INFINIBAND, nic("mlx5_2")], ("--link", "InfiniBand"), "01", ""),
    "with a routed address": ([*WITH_ADDRESS, *NO_ADDRESS], (), "01", "3"),
    "smallest GID": (
        [nic("mlx5_0", gids=dict.fromkeys(range(3), IPV4)), nic("mlx5_1", gids={1: IPV4, 2: IPV4})],
        (),
        "01",
        "1",
    ),
    "GID of IPv6": ([nic(f"mlx5_{i}", gids={1: LOCAL, 3: IPV6}) for i in range(2)], (), "01", "3"),
    "GID of a routed address": ([nic(f"mlx5_{i}", gids={1: LOCAL, 2: IPV4}) for i in range(2)], (), "01", "2"),
    "flat network": ([nic("mlx5_0", gids={1: LOCAL}), nic("mlx5_1", gids={1: LOCAL, 3: LOCAL})], (), "01", "1"),
}
ON_A_RAIL = [
    nic("mlx5_0", path=NEAR),
    nic("mlx5_1", path=f"{BRIDGE}/0000:1a:00.0", state=DOWN),
    nic("mlx5_2", path=FAR),
]
MISSING: dict[str, tuple[list[Any], tuple[str, ...], str]] = {  # NICs, arguments, what is said
    "a port is down": (
        [nic("mlx5_0"), nic("mlx5_1", state=DOWN)],
        (),
        "has 1; sees mlx5_0:1 (Ethernet, ACTIVE), mlx5_1:1",
    ),
    "no address": ([nic("mlx5_0", gids={}), nic("mlx5_1", gids={})], (), "there is mlx5_0:1: none; mlx5_1:1: none"),
    "no NIC": ([], (), "this pod was given no NIC: is the device plugin installed"),
    "no device plugin": ([nic("mlx5_0", given=False), nic("mlx5_1", given=False)], (), "does fabric.resources ask"),
    "NICs of other pods": ([*PAIR, nic("mlx5_2", given=False)], ("--nics", "3"), "mlx5_2:1 (Ethernet, ACTIVE, no /"),
    "other names": ([nic("qedr0")], (), "sees qedr0:1 (Ethernet, ACTIVE). fabric.devices and fabric.link say"),
    "all are excluded": (PAIR, ("--exclude", "mlx5_"), "has 0"),
    "storage for a rail that is down": (ON_A_RAIL, (), "needs 2 active ports of mlx5_*, has 1"),
    "a bond for a rail": ([nic("mlx5_0"), nic("mlx5_bond_0")], (), "mlx5_bond_0:1 (Ethernet, ACTIVE, a bond)"),
    "a bond by its interface": (
        [nic("mlx5_0"), nic("mlx5_9", interface="uplink")],
        (),
        "mlx5_9:1 (Ethernet, ACTIVE, a bond)",
    ),
    "a rail without address": (
        [WITH_ADDRESS[0], nic("mlx5_1", gids={1: LOCAL})],
        (),
        "link-local at 1, IPv4 at 3; mlx5_1:1:",
    ),
    "a rail of another GID": ([WITH_ADDRESS[0], nic("mlx5_1", gids={2: IPV4})], (), "at one GID index"),
}


def fill(machine: Machine, nics: list[Any]) -> None:
    (machine.folder / "sys" / "class" / "net" / "uplink" / "bonding").mkdir(parents=True)
    for path in (VM,) if nics is IN_VMS else (f"{BRIDGE}/0000:18:00.0",) if nics is ON_A_RAIL else GPUS:
        if any("path" in facts for _, facts in nics):
            machine.gpu(path)
    for name, facts in nics:
        machine.nic(name, **facts)


@pytest.mark.parametrize("what", CHOSEN)
def test_ports_that_can_be_used_are_told_to_libraries(preflight: ModuleType, machine: Machine, what: str) -> None:
    nics, more, ports, gid = CHOSEN[what]
    fill(machine, nics)
    problems, env = look(preflight, machine, *more)
    assert not problems
    names = [name.partition(":")[0] for name in env["UCX_NET_DEVICES"].split(",")]
    assert "".join(name[0] if "mlx5" not in name else name[-1] for name in names) == ports
    assert env["NCCL_IB_HCA"] == f"={env['UCX_NET_DEVICES']}" and env["UCX_TLS"] == "^tcp"
    assert env.get("UCX_IB_GID_INDEX", "") == env.get("NCCL_IB_GID_INDEX", "") == gid


@pytest.mark.parametrize("what", MISSING)
def test_port_that_is_missing_is_said_unless_tcp_is_allowed(preflight: ModuleType, machine: Machine, what: str) -> None:
    nics, more, said = MISSING[what]
    fill(machine, nics)
    (problem,) = look(preflight, machine, *more)[0]
    assert said in problem
    problems, env = look(preflight, machine, *more, "--allow-tcp", "--net", "IB")
    assert not problems and not env  # UCX and NCCL are told nothing, and use TCP


def test_node_that_cannot_be_opened_does_not_count(preflight: ModuleType, machine: Machine) -> None:
    fill(machine, PAIR)
    node = machine.folder / "dev" / "infiniband" / "uverbs1"
    node.unlink()
    node.mkdir()  # as root, who may open every file, this is what fails
    (problem,) = look(preflight, machine)[0]
    assert "has 1; sees" in problem and f"{node}: Is a directory" in problem


def test_variable_that_is_set_already_is_kept(
    preflight: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of one's own is also taken where ports have no common one."""
    fill(machine, [WITH_ADDRESS[0], nic("mlx5_1", gids={2: IPV4})])
    given = {"NCCL_IB_HCA": "ibp", "UCX_TLS": "rc,cuda", "UCX_IB_GID_INDEX": "1", "NCCL_IB_GID_INDEX": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    problems, env = look(preflight, machine, "--net", "IB")
    assert not problems and env == {"UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1", "NCCL_NET": "IB"}


@pytest.mark.parametrize(
    ("limit", "capabilities", "good"),
    [
        ("unlimited", "0000000000000000", True),
        ("8388608", "00000000a80425fb", False),  # what Docker gives, without IPC_LOCK
        ("8388608", "0000000000004000", True),  # root with the capability that the fabric adds
    ],
)
def test_memory_may_be_locked(
    preflight: ModuleType, machine: Machine, limit: str, capabilities: str, good: bool
) -> None:
    fill(machine, PAIR)
    machine.memory(limit, capabilities)
    problems = look(preflight, machine)[0]
    assert (not problems) is good
    for way in ("may lock 8388608 bytes", "LimitMEMLOCK=infinity", "k8s/prerequisites/memlock", "workersAsRoot=true"):
        assert good or way in problems[0]


def test_limits_of_this_machine_are_understood(preflight: ModuleType) -> None:
    """The kernel's own text, of which the others here are copies."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = Path("/proc/self/status").read_text()
    capable = int(status.partition("CapEff:")[2].split()[0], 16) >> 14 & 1
    problems = preflight._locked_memory(Path("/proc"))
    assert (not problems) is (limit == resource.RLIM_INFINITY or bool(capable))
    assert not problems or f"may lock {limit} bytes" in problems[0]


def test_model_the_cache_and_files_of_the_node(preflight: ModuleType, tmp_path: Path) -> None:
    def problems(*more: str) -> list[str]:
        options = ["--model", str(tmp_path / "model"), "--cache", str(tmp_path / "cache"), *more]
        return preflight.look(preflight.parse(options))[0]

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
    plugin = tmp_path / "libnccl-net.so"
    needs = ("--needs", str(tmp_path), "--needs", str(plugin))
    assert problems(*needs) == [f"{plugin} is not on this node yet"]
    plugin.touch()
    assert not problems(*needs)


def test_cache_that_code_cannot_be_loaded_from_is_said(tmp_path: Path) -> None:
    """The kernel's own answer, on a mount in a namespace of the test's own."""
    script = "import runpy, sys; f = runpy.run_path(sys.argv[1]); print(*f['look'](f['parse'](sys.argv[2:]))[0])"
    mount = f'mount -t tmpfs -o noexec tmpfs {tmp_path}; exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-ec", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    command += [sys.executable, "-c", script, str(PREFLIGHT), "--cache", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path} cannot hold code (Operation not permitted" in said and "cache.kind=emptyDir" in said


def test_marker_is_the_one_that_the_download_writes(preflight: ModuleType) -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir() if path.is_file())
    assert f'marker="$FOLDER/{preflight.MARKER}"' in templates


def test_pauses_between_looks_grow_to_a_minute(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            (tmp_path / "config.json").touch()

    monkeypatch.setattr(preflight, "time", SimpleNamespace(sleep=sleep))
    assert preflight.main(["--model", str(tmp_path)]) == 0
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_it_waits_until_the_pod_can_work(machine: Machine, tmp_path: Path) -> None:
    """The process stays, says what is missing, and ends well as soon as it is there."""
    script, model, env = tmp_path / "preflight.py", tmp_path / "model", tmp_path / "fabric.env"
    script.write_text(PREFLIGHT.read_text().replace("PAUSES_S = (5.0, 60.0)", "PAUSES_S = (0.05, 0.1)"))
    command = [sys.executable, str(script), *NICS, *machine.options()]
    command += ["--model", str(model), "--env", str(env)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "config.json is missing" in process.stdout.readline()
        model.mkdir()
        (model / "config.json").write_text("{}")
        while "given no NIC" not in process.stdout.readline():
            assert process.poll() is None
        for name in ("mlx5_0", "mlx5_1"):
            machine.nic(name)
        while "good: NCCL_IB_GID_INDEX=3" not in process.stdout.readline():
            assert process.poll() is None
        assert process.wait() == 0
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
