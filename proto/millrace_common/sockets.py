"""Listening sockets for addresses of the configuration: `host:port`, IPv6 as `[host]:port`."""

from __future__ import annotations

import socket


def listen(address: str, backlog: int = 100) -> socket.socket:
    """Return a bound, listening socket; port 0: any free one. Raises OSError for an unavailable address."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=backlog)
