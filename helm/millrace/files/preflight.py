"""The init container of every pod: look whether it can work before it takes a place, and say what is missing.

A pod that cannot work stays here, tells why, and looks again after a growing pause. It never fails: a failed container
makes LeaderWorkerSet start the whole group again, for ever. Standard library only.

--model FOLDER      the checkpoint is there and complete; --marker: so says the job that downloads it
--cache FOLDER      of what workers compile: it can be written to, and loaded as code from there
--needs FILE        which something else puts onto the node
--nics N            so many RDMA ports can be used; which ones, `look_at_rdma` decides
--env FILE          written at the end: what UCX and NCCL must be told about these ports, as shell assignments, without
                    the variables that this container has: somebody has set them, for the worker too
"""

import argparse
import ipaddress
import mmap
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MARKER = ".millrace-complete"  # written by the download job
ACTIVE = "ACTIVE"
ROCE = "RoCE v2"
USUAL_GID = 3  # where the RoCE v2 GID of an IPv4 address is with most drivers
GID_KINDS = ("IPv4", "IPv6", "link-local")  # the best first; a link-local address is not routed
GID_VARIABLES = ("UCX_IB_GID_INDEX", "NCCL_IB_GID_INDEX")
NVIDIA, GPU_CLASSES = "0x10de", ("0x0300", "0x0302")  # PCI: display and 3D controllers
SAME_SWITCH, SAME_BRIDGE, FAR = range(3)  # how far a NIC is from the nearest GPU
CAP_IPC_LOCK = 14
PAUSES_S = (5.0, 60.0)


@dataclass(frozen=True)
class Port:
    device: str
    number: str
    state: str
    link: str  # InfiniBand or Ethernet; EFA has another
    gids: Mapping[int, str]  # of RoCE v2: index -> one of GID_KINDS
    bond: bool
    distance: int  # of the device: SAME_SWITCH, SAME_BRIDGE or FAR
    node: str  # why its uverbs node cannot be opened; empty: it can

    def __str__(self) -> str:
        facts = [self.link, self.state, self.node, *(["a bond"] if self.bond else [])]
        return f"{self.name} ({', '.join(filter(None, facts))})"

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def read_ports(sysfs: Path, dev: Path) -> list[Port]:
    """Every port of every RDMA device of the host: sysfs shows them all, whatever the container was given."""
    gpus = [_bridges(path) for path in sorted(sysfs.glob("bus/pci/devices/*")) if _is_gpu(path)]
    nodes = {_text(path / "ibdev"): path.name for path in sysfs.glob("class/infiniband_verbs/uverbs*")}
    found = []
    for folder in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        device = folder.parents[1]
        found.append(
            Port(
                device=device.name,
                number=folder.name,
                state=_text(folder / "state").rpartition(":")[2].strip(),
                link=_text(folder / "link_layer"),
                gids=_roce_gids(folder),
                bond=_is_bond(sysfs, folder),
                distance=_distance(_bridges(device / "device"), gpus),
                node=_why_closed(dev / "infiniband" / nodes[device.name]) if device.name in nodes else "no uverbs node",
            )
        )
    return found


def _is_gpu(function: Path) -> bool:
    return _text(function / "vendor") == NVIDIA and _text(function / "class").startswith(GPU_CLASSES)


def _bridges(link: Path) -> tuple[str, ...]:
    """The PCI host bridge above a device, then each bridge and switch down to it; empty where sysfs knows none."""
    names = link.resolve().parts[:-1]
    start = next((place for place, name in enumerate(names) if name.startswith("pci") and ":" in name), len(names))
    return names[start:]


def _distance(nic: tuple[str, ...], gpus: list[tuple[str, ...]]) -> int:
    """What nvidia-smi calls PIX and PXB is SAME_SWITCH, and PHB is SAME_BRIDGE."""
    if any(len(nic) > 1 and nic[:2] == gpu[:2] for gpu in gpus):
        return SAME_SWITCH
    return SAME_BRIDGE if any(nic and nic[:1] == gpu[:1] for gpu in gpus) else FAR


def _is_bond(sysfs: Path, port: Path) -> bool:
    interfaces = {_text(path) for path in port.glob("gid_attrs/ndevs/*")} - {""}
    bonded = any((sysfs / "class" / "net" / name / "bonding").is_dir() for name in interfaces)
    return bonded or "bond" in port.parents[1].name


def _why_closed(node: Path) -> str:
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"no {node}"
    except OSError as error:
        return f"{node}: {error.strerror}"
    return ""


def _roce_gids(port: Path) -> dict[int, str]:
    found = {}
    for path in port.glob("gid_attrs/types/*"):
        gid = _text(port / "gids" / path.name)
        if _text(path) == ROCE and gid.replace(":", "").strip("0"):
            address = ipaddress.IPv6Address(gid)
            kind = "IPv4" if address.ipv4_mapped else "link-local" if address.is_link_local else "IPv6"
            found[int(path.name)] = kind
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # entries of a table that are not in use answer EINVAL
        return ""


def rails(ports: list[Port], needed: int) -> list[Port]:
    """The nearest to GPUs, all that are equally near; further ones only where there are not enough. Ports that are down
    count: no NIC of storage takes the place of a rail that has lost its link."""
    for distance in (SAME_SWITCH, SAME_BRIDGE, FAR):
        near = [port for port in ports if port.distance <= distance]
        if len(near) >= needed:
            return near
    return ports


def common_gid(ports: list[Port], needed: int) -> tuple[int, list[Port]] | None:
    """The GID index, and the ports that have an address there; libraries take only one index for all ports. None where
    fewer than `needed` ports agree on one, or only on link-local addresses while another port has a routed one."""
    for kind in GID_KINDS:
        if kind == "link-local" and any({"IPv4", "IPv6"} & set(port.gids.values()) for port in ports):
            return None
        votes = Counter(index for port in ports for index, found in port.gids.items() if found == kind)
        if votes and max(votes.values()) >= needed:
            best = max(votes, key=lambda index: (votes[index], index == USUAL_GID, -index))
            return best, [port for port in ports if port.gids.get(best) == kind]
    return None


def look_at_rdma(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Problems, and the variables for the ports that can be used: of the right name and type, in this container, among
    the nearest to GPUs, active, and on Ethernet with an address at one GID index."""
    everything = read_ports(options.sysfs, options.dev)
    fitting = [port for port in everything if _fits(port, options)]
    good = [port for port in rails([p for p in fitting if not p.node], options.nics) if port.state == ACTIVE]
    problems = []
    if len(good) < options.nics:
        problems.append(_too_few(options, everything, fitting, good))
    env = {"UCX_TLS": "^tcp"}
    if options.net:  # without it NCCL takes sockets when it finds no device, and says nothing
        env["NCCL_NET"] = options.net
    set_already = all(name in os.environ for name in GID_VARIABLES)
    if good and all(port.link == "Ethernet" for port in good) and not set_already:
        found = common_gid(good, min(options.nics, len(good)))
        if found is None:
            problems.append(_no_gid(options.nics, good))
        else:
            index, good = found
            env |= dict.fromkeys(GID_VARIABLES, str(index))
    names = ",".join(port.name for port in good)
    env |= {"UCX_NET_DEVICES": names, "NCCL_IB_HCA": f"={names}"}
    return problems + _locked_memory(options.proc), env


def _fits(port: Port, options: argparse.Namespace) -> bool:
    wanted = port.device.startswith(options.devices) and options.link in ("", port.link)
    left_out = bool(options.exclude) and port.device.startswith(options.exclude)
    bond = port.bond and not any("bond" in prefix for prefix in options.devices)
    return wanted and not left_out and not bond


def _too_few(options: argparse.Namespace, everything: list[Port], fitting: list[Port], good: list[Port]) -> str:
    """What is missing, and which value would help."""
    if not list((options.dev / "infiniband").glob("uverbs*")):
        return (
            f"there is no {options.dev}/infiniband/uverbs*, so this pod was given no NIC: is the device plugin"
            " installed, and does fabric.resources ask for what it offers?"
        )
    kind = f"{options.link} " if options.link else ""
    text = f"needs {options.nics} active {kind}ports of {'*, '.join(options.devices)}*, has {len(good)}"
    text += f"; sees {', '.join(map(str, everything)) or 'no RDMA device at all'}"
    return text if fitting else f"{text}. fabric.devices and fabric.link say which ones are meant"


def _no_gid(needed: int, ports: list[Port]) -> str:
    seen = []
    for port in ports:
        gids = [f"{kind} at {index}" for index, kind in sorted(port.gids.items())]
        seen.append(f"{port.name}: {', '.join(gids) or 'none'}")
    return (
        f"{needed} ports need an address of {ROCE} of one kind at one GID index; there is {'; '.join(seen)}. Give every"
        f" rail an IPv4 address, name the other devices in fabric.exclude, or set {' and '.join(GID_VARIABLES)} in"
        " fabric.env"
    )


def _locked_memory(proc: Path) -> list[str]:
    """RDMA locks the KV pool and the buffers of NCCL into memory."""
    limits = _text(proc / "self" / "limits")
    limit = next((line.split()[3] for line in limits.splitlines() if line.startswith("Max locked memory")), "unlimited")
    status = dict(line.partition(":")[::2] for line in _text(proc / "self" / "status").splitlines())
    if limit == "unlimited" or int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
        return []
    return [
        f"may lock {limit} bytes of memory only. Either set LimitMEMLOCK=infinity for the node's container runtime"
        " (k8s/prerequisites/memlock does that; then delete this pod), or set podSecurity.workersAsRoot=true, so that"
        " the capability IPC_LOCK of the fabric counts: for other users than root Kubernetes drops it"
    ]


def _cache(folder: Path) -> list[str]:
    """Libraries that are compiled into the folder are mapped as code, which a mount with noexec refuses."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"{folder} is not writable by user {os.getuid()}, or not there"]
    try:
        with tempfile.TemporaryFile(dir=folder) as page:
            page.truncate(mmap.PAGESIZE)
            mmap.mmap(page.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return [
            f"{folder} cannot hold code ({error.strerror}; is it mounted with noexec?), so no kernel that is compiled"
            " there could be loaded. Set cache.kind=emptyDir, or another cache.hostPath: docs/platforms has one"
        ]
    return []


def look(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    problems: list[str] = []
    env: dict[str, str] = {}
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            problems.append(f"no checkpoint in {options.model}: config.json is missing")
        elif options.marker and not (options.model / MARKER).exists():
            problems.append(f"the download into {options.model} is not complete; see the log of its job")
    if options.cache is not None:
        problems += _cache(options.cache)
    problems += [f"{path} is not on this node yet" for path in options.needs if not path.exists()]
    if options.nics:
        problems_of_rdma, env = look_at_rdma(options)
        if problems_of_rdma and options.allow_tcp:
            say(f"WARNING: goes on over TCP, which is slow: {'; '.join(problems_of_rdma)}")
            return problems, {}
        problems += problems_of_rdma
    return problems, {name: value for name, value in sorted(env.items()) if name not in os.environ}


def say(text: str) -> None:
    print(f"preflight: {text}", flush=True)  # noqa: T201


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--marker", action="store_true")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--needs", type=Path, action="append", default=[])
    parser.add_argument("--nics", type=int, default=0)
    parser.add_argument("--devices", type=names, default=("",), help="how they begin, with commas")
    parser.add_argument("--exclude", type=names, default=(), help="how the others begin, with commas")
    parser.add_argument("--link", default="", help="InfiniBand or Ethernet; empty: any")
    parser.add_argument("--net", default="", help="NCCL_NET")
    parser.add_argument("--allow-tcp", action="store_true")
    parser.add_argument("--env", type=Path)
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    parser.add_argument("--dev", type=Path, default=Path("/dev"))
    parser.add_argument("--proc", type=Path, default=Path("/proc"))
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options, pause = parse(argv), PAUSES_S[0]
    while True:
        problems, env = look(options)
        if not problems:
            break
        for problem in problems:
            say(problem)
        say(f"this pod waits here, and looks again in {pause:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, PAUSES_S[1])
    if options.env is not None:
        options.env.write_text("".join(f"{name}='{value}'\n" for name, value in env.items()))
    say(f"good: {' '.join(f'{name}={value}' for name, value in env.items()) or 'nothing to set'}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # without one PID 1 never gets it
    sys.exit(main(sys.argv[1:]))
