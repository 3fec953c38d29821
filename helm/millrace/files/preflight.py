"""The init container of every pod: look whether it can work before it takes a place, and say what is missing.

A pod that cannot work stays here, tells why, and looks again after a growing pause. It never fails: a failed container
makes LeaderWorkerSet start the whole group again, for ever. Standard library only.

--model FOLDER      the checkpoint is there and complete; --marker: so says the job that downloads it
--writable FOLDER   of compile caches
--nics N            so many RDMA ports are active, of devices that begin with --devices and of type --link, and on
                    Ethernet all have a GID of RoCE v2 at one index; memory may be locked without limit
--env FILE          written at the end: what UCX and NCCL must be told about these devices, as shell assignments
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MARKER = ".millrace-complete"  # written by the download job
ACTIVE = "ACTIVE"
ROCE = "RoCE v2"
USUAL_GID = 3  # where the RoCE v2 GID of an IPv4 address is with most drivers
PAUSES_S = (5.0, 60.0)


@dataclass(frozen=True)
class Port:
    device: str
    number: str
    state: str
    link: str  # InfiniBand or Ethernet
    gids: frozenset[int]  # indices of RoCE v2 GIDs

    def __str__(self) -> str:
        return f"{self.device}:{self.number} ({self.link}, {self.state})"


def read_ports(sysfs: Path) -> list[Port]:
    """Every port of every RDMA device."""
    found = []
    for folder in sorted(sysfs.glob("class/infiniband/*/ports/*")):
        state = _text(folder / "state").rpartition(":")[2].strip()
        link = _text(folder / "link_layer")
        found.append(Port(folder.parents[1].name, folder.name, state, link, _roce_gids(folder)))
    return found


def _roce_gids(folder: Path) -> frozenset[int]:
    types = {path.name: _text(path) for path in folder.glob("gid_attrs/types/*")}
    used = {path.name for path in folder.glob("gids/*") if _text(path).replace(":", "").strip("0")}
    return frozenset(int(index) for index, kind in types.items() if kind == ROCE and index in used)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # entries of a table that are not in use answer EINVAL
        return ""


def common_gid(ports: list[Port]) -> int | None:
    """The one GID index that all ports have; libraries take only one."""
    shared = frozenset.intersection(*(port.gids for port in ports)) if ports else frozenset()
    return None if not shared else USUAL_GID if USUAL_GID in shared else min(shared)


def look_at_rdma(options: argparse.Namespace, memlock: int) -> tuple[list[str], dict[str, str]]:
    """Problems, and the environment of those ports that are good."""
    everything = read_ports(options.sysfs)
    ours = [port for port in everything if port.device.startswith(options.devices)]
    good = [p for p in ours if p.state == ACTIVE and options.link in ("", p.link)]
    problems = []
    if len(good) < options.nics:
        seen = ", ".join(map(str, everything)) or "no RDMA device at all"
        kind = f"{options.link} " if options.link else ""
        problems.append(f"needs {options.nics} active {kind}ports of {options.devices}*, has {len(good)}; sees {seen}")
    if memlock != resource.RLIM_INFINITY:
        problems.append(
            f"may lock {memlock} bytes of memory only: set LimitMEMLOCK=infinity for the node's container runtime"
        )
    names = ",".join(f"{port.device}:{port.number}" for port in good)
    env = {"UCX_NET_DEVICES": names, "UCX_TLS": "^tcp", "NCCL_IB_HCA": f"={names}"}
    if good and all(port.link == "Ethernet" for port in good):
        gid = common_gid(good)
        if gid is None:
            problems.append(f"no GID index is of {ROCE} on all of {names}")
        else:
            env |= {"UCX_IB_GID_INDEX": str(gid), "NCCL_IB_GID_INDEX": str(gid)}
    return problems, env


def look(options: argparse.Namespace, memlock: int) -> tuple[list[str], dict[str, str]]:
    problems: list[str] = []
    env: dict[str, str] = {}
    if options.model is not None:
        if not (options.model / "config.json").is_file():
            problems.append(f"no checkpoint in {options.model}: config.json is missing")
        elif options.marker and not (options.model / MARKER).exists():
            problems.append(f"the download into {options.model} is not complete; see the log of its job")
    if options.writable is not None and not os.access(options.writable, os.W_OK | os.X_OK):
        problems.append(f"{options.writable} is not writable by user {os.getuid()}, or not there")
    if options.nics:
        problems_of_rdma, env = look_at_rdma(options, memlock)
        problems += problems_of_rdma
        if problems_of_rdma and options.allow_tcp:
            say(f"WARNING: goes on over TCP, which is slow: {'; '.join(problems_of_rdma)}")
            return [problem for problem in problems if problem not in problems_of_rdma], {}
    return problems, env


def say(text: str) -> None:
    print(f"preflight: {text}", flush=True)  # noqa: T201


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--marker", action="store_true")
    parser.add_argument("--writable", type=Path)
    parser.add_argument("--nics", type=int, default=0)
    parser.add_argument("--devices", default="")
    parser.add_argument("--link", default="")
    parser.add_argument("--allow-tcp", action="store_true")
    parser.add_argument("--env", type=Path)
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options, pause = parse(argv), PAUSES_S[0]
    while True:
        problems, env = look(options, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
        if not problems:
            break
        for problem in problems:
            say(problem)
        say(f"this pod waits here, and looks again in {pause:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, PAUSES_S[1])
    if options.env is not None:
        options.env.write_text("".join(f"{name}='{value}'\n" for name, value in sorted(env.items())))
    say(f"good: {' '.join(f'{name}={value}' for name, value in sorted(env.items())) or 'nothing to set'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
