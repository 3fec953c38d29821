"""Network namespaces for single processes, joined by a bridge: what is cut off there loses packets, as behind a switch
that fails. Needs Linux, iproute2 and the right to change networks; nothing outside of this machine can reach them.

with Namespaces(["decode-0"]) as spaces:
    run([*spaces.enter("decode-0"), "server"]); connect(spaces.host("decode-0")); spaces.cut("decode-0")
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

IP = shutil.which("ip") or "/sbin/ip"
PROBE = "probe"


class Namespaces:
    """Names are the callers'; those of the system carry our process id, so that several runs do not meet."""

    def __init__(self, names: Sequence[str]) -> None:
        self._number = {name: i for i, name in enumerate(names, start=2)}  # 1 is the bridge
        self._bridge = f"mr{os.getpid()}"
        self._net = f"10.213.{os.getpid() % 256}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            _ip("link", "add", self._bridge, "type", "bridge")
            stack.callback(_ip, "link", "delete", self._bridge)
            _ip("address", "add", f"{self._net}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for name in self._number:
                space, link = self._space(name), self._link(name)
                _ip("netns", "add", space)
                stack.callback(_ip, "netns", "delete", space)
                _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
                stack.callback(_ip, "link", "delete", link)  # at once; with its namespace it would go some time later
                _ip("link", "set", link, "master", self._bridge, "up")
                _ip("-netns", space, "address", "add", f"{self.host(name)}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-netns", space, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, name: str) -> str:
        """Its address, for us and for the other namespaces."""
        return f"{self._net}.{self._number[name]}"

    def enter(self, name: str) -> list[str]:
        """What stands before the command line of a process that is to live there."""
        return [IP, "netns", "exec", self._space(name)]

    def cut(self, name: str) -> None:
        """From now on every packet from and to it is lost."""
        _ip("link", "set", self._link(name), "down")

    def join(self, name: str) -> None:
        _ip("link", "set", self._link(name), "up")

    def _space(self, name: str) -> str:
        return f"{self._bridge}-{self._number[name]}"

    def _link(self, name: str) -> str:
        return f"{self._bridge}v{self._number[name]}"  # at most 15 characters


@functools.cache
def available() -> bool:
    """Whether this machine lets us make one."""
    try:
        with Namespaces([PROBE]) as spaces:
            return subprocess.run([*spaces.enter(PROBE), "true"], capture_output=True, check=False).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return False


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True)
