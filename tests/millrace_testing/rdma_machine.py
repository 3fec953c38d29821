"""A made-up machine with GPUs and RDMA devices, for tests of the preflight: sysfs, /dev and /proc in a folder."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from millrace_chart.render import CHART

PREFLIGHT = CHART / "files" / "preflight.py"
IPV4, IPV6, LOCAL = "0000:0000:0000:0000:0000:ffff:0a00:0001", "2001:0db8::1", "fe80:0000:0000:0000:0a00:00ff:fe00:0001"


def load_preflight() -> ModuleType:
    """It lies in a ConfigMap and in no package."""
    spec = importlib.util.spec_from_file_location("preflight", PREFLIGHT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Machine:
    """What a container sees: sysfs has every device of the host, /dev only those that the container was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices = 0
        (folder / "dev").mkdir()
        self.memory("unlimited")

    def memory(self, limit: str, capabilities: str = "0") -> None:
        (self.folder / "proc" / "self").mkdir(parents=True, exist_ok=True)
        line = f"Max locked memory         {limit:<21}{limit:<21}bytes     \n"
        (self.folder / "proc" / "self" / "limits").write_text(f"Limit  Soft Limit  Hard Limit  Units\n{line}")
        (self.folder / "proc" / "self" / "status").write_text(f"Name:\tpython3\nCapEff:\t{capabilities}\n")

    def pci(self, path: str, vendor: str, kind: str) -> Path:
        """A PCI function; `path` leads there from the host bridge."""
        function = self.folder / "sys" / "devices" / path
        function.mkdir(parents=True)
        (function / "vendor").write_text(f"{vendor}\n")
        (function / "class").write_text(f"{kind}\n")
        link = self.folder / "sys" / "bus" / "pci" / "devices" / function.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(function)
        return function

    def gpu(self, path: str) -> None:
        self.pci(path, "0x10de", "0x030200")

    def nic(
        self,
        name: str,
        link: str = "Ethernet",
        state: str = "4: ACTIVE",
        gids: dict[int, str] | None = None,
        path: str = "",
        given: bool = True,
        interface: str = "",
    ) -> None:
        """One port. `gids`: of RoCE v2; without, IPv4 at 2 and 3. There are some of v1 and an empty one too."""
        function = self.pci(path or f"pci{self.devices:04x}:00/0000:{self.devices:02x}:00.0", "0x15b3", "0x020700")
        port = function / "infiniband" / name / "ports" / "1"
        for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / part).mkdir(parents=True)
        found = {2: IPV4, 3: IPV4} if gids is None else gids
        for index in range(5):
            kind, gid = ("RoCE v2", found[index]) if index in found else ("IB/RoCE v1", LOCAL)
            if index == 4:
                kind, gid = "RoCE v2", "0000:0000:0000:0000:0000:0000:0000:0000"
            (port / "gids" / str(index)).write_text(f"{gid}\n")
            (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")
            (port / "gid_attrs" / "ndevs" / str(index)).write_text(f"{interface}\n")
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
        (function / "infiniband" / name / "device").symlink_to(function)
        for part in ("infiniband", "infiniband_verbs"):
            (self.folder / "sys" / "class" / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "sys" / "class" / "infiniband" / name).symlink_to(function / "infiniband" / name)
        verbs = self.folder / "sys" / "class" / "infiniband_verbs" / f"uverbs{self.devices}"
        verbs.mkdir()
        (verbs / "ibdev").write_text(f"{name}\n")
        if given:
            node = self.folder / "dev" / "infiniband" / f"uverbs{self.devices}"
            node.parent.mkdir(exist_ok=True)
            node.touch()
        self.devices += 1

    def options(self) -> list[str]:
        """That lead files/preflight.py here."""
        folders = {"sysfs": "sys", "dev": "dev", "proc": "proc"}
        return [f"--{option}={self.folder / name}" for option, name in folders.items()]
