"""The init container of every pod, on made-up machines."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from millrace_chart.render import CHART, ROOT
from millrace_testing.rdma_machine import IPV4, IPV6, LOCAL, PREFLIGHT, Machine, load_preflight

NICS = ("--nics", "2", "--devices", "mlx5_")
IPC_LOCK = "0000000000004000"


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    return load_preflight()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def look(preflight: ModuleType, machine: Machine, *arguments: str) -> tuple[list[str], dict[str, str]]:
    return preflight.look(preflight.parse([*NICS, *machine.options(), *arguments]))


def chosen(preflight: ModuleType, machine: Machine, *arguments: str) -> list[str]:
    problems, env = look(preflight, machine, *arguments)
    assert not problems
    return [name.partition(":")[0] for name in env["UCX_NET_DEVICES"].split(",")]


def test_ethernet_ports_and_their_common_gid(preflight: ModuleType, machine: Machine) -> None:
    machine.nic("mlx5_0", gids={1: IPV4, 2: IPV4, 3: IPV4})
    machine.nic("mlx5_1", gids={1: IPV4, 3: IPV4})
    machine.nic("bnxt_re0")
    problems, env = look(preflight, machine, "--link", "Ethernet", "--net", "IB")
    assert not problems
    assert env == {
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "UCX_TLS": "^tcp",
        "UCX_IB_GID_INDEX": "3",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_NET": "IB",
    }


@pytest.mark.parametrize(
    ("first", "second", "index"),
    [
        ({0: IPV4, 1: IPV4, 2: IPV4}, {1: IPV4, 2: IPV4}, "1"),  # the smallest where the usual one is not
        ({1: LOCAL, 3: IPV6}, {1: LOCAL, 3: IPV6}, "3"),  # an address that is routed
        ({1: LOCAL, 2: IPV4}, {1: LOCAL, 2: IPV4}, "2"),
        ({1: LOCAL}, {1: LOCAL, 3: LOCAL}, "1"),  # a flat network without addresses
    ],
)
def test_the_gid(
    preflight: ModuleType, machine: Machine, first: dict[int, str], second: dict[int, str], index: str
) -> None:
    machine.nic("mlx5_0", gids=first)
    machine.nic("mlx5_1", gids=second)
    problems, env = look(preflight, machine)
    assert not problems and env["UCX_IB_GID_INDEX"] == env["NCCL_IB_GID_INDEX"] == index


def test_a_nic_with_a_link_local_address_is_left_out_and_does_not_choose_the_gid(
    preflight: ModuleType, machine: Machine
) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        machine.nic(name, gids={1: LOCAL, 3: IPV4})
    machine.nic("mlx5_2", gids={1: LOCAL})
    machine.nic("mlx5_3", gids={})
    problems, env = look(preflight, machine)
    assert not problems and (env["UCX_NET_DEVICES"], env["UCX_IB_GID_INDEX"]) == ("mlx5_0:1,mlx5_1:1", "3")


@pytest.mark.parametrize("rest", [{1: LOCAL}, {1: LOCAL, 2: IPV4}, {}])
def test_a_rail_without_the_address_of_the_others_is_said(
    preflight: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, rest: dict[int, str]
) -> None:
    """A link-local address at a common index is no way out, because nothing routes it. The user's own index is."""
    machine.nic("mlx5_0", gids={1: LOCAL, 3: IPV4})
    machine.nic("mlx5_1", gids=rest)
    (problem,) = look(preflight, machine)[0]
    assert "at one GID index" in problem and "mlx5_0:1: link-local at 1, IPv4 at 3; mlx5_1:1:" in problem
    for name in ("UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX"):
        monkeypatch.setenv(name, "1")
    problems, env = look(preflight, machine)
    assert not problems and "UCX_IB_GID_INDEX" not in env and env["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"


def test_infiniband_needs_no_gid(preflight: ModuleType, machine: Machine) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        machine.nic(name, link="InfiniBand", gids={})
    machine.nic("mlx5_2", link="Ethernet")  # the management port
    problems, env = look(preflight, machine, "--link", "InfiniBand")
    assert not problems and env["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1" and "UCX_IB_GID_INDEX" not in env


def test_names_of_rdma_core_and_other_vendors(preflight: ModuleType, machine: Machine) -> None:
    for name in ("rocep12s0f0", "bnxt_re0", "rxe0"):
        machine.nic(name)
    assert chosen(preflight, machine, "--devices", "mlx5_,roce,bnxt_re") == ["bnxt_re0", "rocep12s0f0"]


def test_only_devices_that_the_container_was_given(preflight: ModuleType, machine: Machine) -> None:
    """sysfs shows the NICs of other pods too."""
    machine.nic("mlx5_0")
    machine.nic("mlx5_1", given=False)
    machine.nic("mlx5_2")
    assert chosen(preflight, machine) == ["mlx5_0", "mlx5_2"]
    (problem,) = look(preflight, machine, "--nics", "3")[0]
    assert f"mlx5_1:1 (Ethernet, ACTIVE, no {machine.folder}/dev/infiniband/uverbs1)" in problem


def test_a_node_that_cannot_be_opened_does_not_count(
    preflight: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.nic("mlx5_0")
    machine.nic("mlx5_1")
    node = machine.folder / "dev" / "infiniband" / "uverbs1"
    node.unlink()
    node.mkdir()  # as root, who may open every file, this is what fails
    (problem,) = look(preflight, machine)[0]
    assert "has 1; sees" in problem and f"{node}: Is a directory" in problem


def test_no_device_plugin(preflight: ModuleType, machine: Machine) -> None:
    machine.nic("mlx5_0", given=False)
    machine.nic("mlx5_1", given=False)
    (problem,) = look(preflight, machine)[0]
    assert f"there is no {machine.folder}/dev/infiniband/uverbs*" in problem
    assert "is the device plugin installed, and does fabric.resources ask" in problem


BRIDGE, SWITCH = "pci0000:15/0000:15:01.0", "pci0000:15/0000:15:01.0/0000:16:00.0"


def test_a_nic_of_storage_is_further_from_the_gpus(preflight: ModuleType, machine: Machine) -> None:
    machine.gpu(f"{SWITCH}/0000:17:00.0/0000:18:00.0")
    machine.gpu("pci0000:37/0000:37:01.0/0000:38:00.0/0000:39:00.0")
    machine.nic("mlx5_0", path=f"{SWITCH}/0000:17:01.0/0000:19:00.0")  # PIX
    machine.nic("mlx5_1", path="pci0000:37/0000:37:01.0/0000:38:01.0/0000:3a:00.0")  # PXB
    machine.nic("mlx5_2", path="pci0000:15/0000:15:02.0/0000:1d:00.0")  # PHB
    machine.nic("mlx5_3", path="pci0000:5f/0000:5f:01.0/0000:60:00.0")  # another socket
    assert chosen(preflight, machine) == ["mlx5_0", "mlx5_1"]
    assert chosen(preflight, machine, "--nics", "3") == ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert chosen(preflight, machine, "--nics", "4") == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]


def test_no_nic_of_storage_takes_the_place_of_a_rail_that_is_down(preflight: ModuleType, machine: Machine) -> None:
    machine.gpu(f"{BRIDGE}/0000:18:00.0")
    machine.nic("mlx5_0", path=f"{BRIDGE}/0000:19:00.0")
    machine.nic("mlx5_1", path=f"{BRIDGE}/0000:1a:00.0", state="1: DOWN")
    machine.nic("mlx5_2", path="pci0000:5f/0000:5f:01.0/0000:60:00.0")
    (problem,) = look(preflight, machine)[0]
    assert "needs 2 active ports of mlx5_*, has 1" in problem and "mlx5_1:1 (Ethernet, DOWN)" in problem


def test_where_sysfs_says_nothing_about_distances_all_count(preflight: ModuleType, machine: Machine) -> None:
    """As in VMs: each device has a bus of its own."""
    machine.gpu("LNXSYSTM:00/VMBUS/pci0001:00/0001:00:00.0")
    for index in range(3):
        machine.nic(f"mlx5_{index}", path=f"LNXSYSTM:00/VMBUS/pci010{index}:00/010{index}:00:02.0")
    assert chosen(preflight, machine) == ["mlx5_0", "mlx5_1", "mlx5_2"]


@pytest.mark.parametrize(("name", "interface"), [("mlx5_bond_0", ""), ("mlx5_9", "uplink")])
def test_a_bond_does_not_replace_a_rail(preflight: ModuleType, machine: Machine, name: str, interface: str) -> None:
    (machine.folder / "sys" / "class" / "net" / "uplink" / "bonding").mkdir(parents=True)
    machine.nic("mlx5_0")
    machine.nic("mlx5_1", state="1: DOWN")
    machine.nic(name, interface=interface)
    (problem,) = look(preflight, machine)[0]
    assert (
        f"has 1; sees mlx5_0:1 (Ethernet, ACTIVE), mlx5_1:1 (Ethernet, DOWN), {name}:1 (Ethernet, ACTIVE, a bond)"
        in problem
    )


def test_bonds_that_are_asked_for(preflight: ModuleType, machine: Machine) -> None:
    for name in ("mlx5_0", "mlx5_bond_0", "mlx5_bond_1"):
        machine.nic(name)
    assert chosen(preflight, machine, "--devices", "mlx5_bond_") == ["mlx5_bond_0", "mlx5_bond_1"]


def test_devices_that_are_left_out(preflight: ModuleType, machine: Machine) -> None:
    for index in range(4):
        machine.nic(f"mlx5_{index}")
    assert chosen(preflight, machine, "--exclude", "mlx5_0,mlx5_2") == ["mlx5_1", "mlx5_3"]
    assert "has 0" in look(preflight, machine, "--exclude", "mlx5_")[0][0]


def test_what_somebody_has_set_is_kept(
    preflight: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.nic("mlx5_0")
    machine.nic("mlx5_1")
    for name, value in {"NCCL_IB_HCA": "ibp", "UCX_TLS": "rc,cuda", "NCCL_NET": ""}.items():
        monkeypatch.setenv(name, value)
    problems, env = look(preflight, machine, "--net", "IB")
    assert not problems and set(env) == {"UCX_NET_DEVICES", "UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX"}


@pytest.mark.parametrize(
    ("states", "gids", "message"),
    [
        (("4: ACTIVE", "1: DOWN"), {3: IPV4}, "has 1; sees mlx5_0:1 (Ethernet, ACTIVE), mlx5_1:1 (Ethernet, DOWN)"),
        (("4: ACTIVE", "4: ACTIVE"), {}, "one kind at one GID index; there is mlx5_0:1: none; mlx5_1:1: none"),
        ((), {}, "this pod was given no NIC"),
    ],
)
def test_what_is_missing_is_said(
    preflight: ModuleType, machine: Machine, states: tuple[str, ...], gids: dict[int, str], message: str
) -> None:
    for index, state in enumerate(states):
        machine.nic(f"mlx5_{index}", state=state, gids=gids)
    (problem,) = look(preflight, machine)[0]
    assert message in problem
    problems, env = look(preflight, machine, "--allow-tcp", "--net", "IB")
    assert not problems and not env  # UCX and NCCL are told nothing, and use TCP


def test_other_names_than_expected_name_the_values(preflight: ModuleType, machine: Machine) -> None:
    machine.nic("qedr0")
    (problem,) = look(preflight, machine)[0]
    assert "sees qedr0:1 (Ethernet, ACTIVE). fabric.devices and fabric.link say which ones are meant" in problem


@pytest.mark.parametrize(
    ("limit", "capabilities", "good"),
    [
        ("unlimited", "0000000000000000", True),
        ("8388608", "0000000000000000", False),
        ("8388608", "00000000a80425fb", False),  # what Docker gives, without IPC_LOCK
        ("8388608", IPC_LOCK, True),  # root with the capability that the fabric adds
        ("8388608", "000001ffffffffff", True),  # privileged
    ],
)
def test_memory_may_be_locked(
    preflight: ModuleType, machine: Machine, limit: str, capabilities: str, good: bool
) -> None:
    machine.nic("mlx5_0")
    machine.nic("mlx5_1")
    machine.memory(limit, capabilities)
    problems = look(preflight, machine)[0]
    assert (not problems) is good
    for way in ("may lock 8388608 bytes", "LimitMEMLOCK=infinity", "k8s/prerequisites/memlock", "workersAsRoot=true"):
        assert good or way in problems[0]


def test_the_limits_of_this_machine_are_understood(preflight: ModuleType) -> None:
    """The kernel's own text, of which the others here are copies."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    status = Path("/proc/self/status").read_text()
    capable = int(status.partition("CapEff:")[2].split()[0], 16) >> 14 & 1
    problems = preflight._locked_memory(Path("/proc"))
    assert (not problems) is (limit == resource.RLIM_INFINITY or bool(capable))
    assert not problems or f"may lock {limit} bytes" in problems[0]


def test_the_model_the_cache_and_files_of_the_node(preflight: ModuleType, tmp_path: Path) -> None:
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


def test_a_cache_that_code_cannot_be_loaded_from_is_said(tmp_path: Path) -> None:
    """The kernel's own answer, on a mount in a namespace of the test's own."""
    script = "import runpy, sys; f = runpy.run_path(sys.argv[1]); print(*f['look'](f['parse'](sys.argv[2:]))[0])"
    mount = f'mount -t tmpfs -o noexec tmpfs {tmp_path}; exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-ec", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    command += [sys.executable, "-c", script, str(PREFLIGHT), "--cache", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path} cannot hold code (Operation not permitted" in said and "cache.kind=emptyDir" in said


def test_the_marker_is_the_one_that_the_download_writes(preflight: ModuleType) -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir() if path.is_file())
    assert f'touch "$FOLDER/{preflight.MARKER}"' in templates


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
