"""Discovery by DNS. A name that does not exist has no workers; after any other failure it keeps its last addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from millrace_router.config import DnsConfig
from millrace_router.discovery.base import Listener, Target, join, one_per_address

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[list[str]]]
NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


async def resolve(host: str) -> list[str]:
    """Return sorted, distinct IP addresses. Where both kinds exist, IPv4 only, because in a dual-stack cluster every
    worker has one of each. Raises OSError as getaddrinfo does.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    kept = socket.AF_INET if any(family == socket.AF_INET for family, *_ in found) else socket.AF_INET6
    return sorted({str(address[0]) for family, *_, address in found if family == kept})


class DnsSource:
    def __init__(self, config: DnsConfig, resolve: Resolve = resolve) -> None:
        self._config = config
        self._resolve = resolve
        self._known: dict[str, list[Target]] = {}  # by name
        self._task: asyncio.Task[None] | None = None

    def start(self, listener: Listener) -> None:
        self._task = asyncio.create_task(self._keep_looking(listener))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_looking(self, listener: Listener) -> None:
        while True:
            failures = await asyncio.gather(*map(self._look_up, self._config.names))
            for failure in filter(None, failures):
                listener.on_trouble(failure)
            if not all(failures):
                listener.on_targets(one_per_address(t for targets in self._known.values() for t in targets))
            await asyncio.sleep(self._config.interval_s)

    async def _look_up(self, name: str) -> str:
        """Look up one name. Returns the kind of trouble, or an empty string."""
        host, _, port = name.rpartition(":")
        try:
            async with asyncio.timeout(self._config.interval_s + 5.0):
                addresses = await self._resolve(host)
        except OSError as error:  # TimeoutError is one
            if not (isinstance(error, socket.gaierror) and error.errno in NO_SUCH_NAME):
                log.warning("cannot resolve %s: %s", host, error or "no answer")
                return "silent" if isinstance(error, TimeoutError) else "failed"
            addresses = []
        targets = [join(address, int(port)) for address in addresses]
        self._known[name] = [Target(address, address, host) for address in targets]
        return ""
