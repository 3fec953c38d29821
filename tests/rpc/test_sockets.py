"""Addresses of both families."""

from __future__ import annotations

import socket

import pytest
from millrace_rpc.http_server import listen
from millrace_testing.ipv6 import needs_ipv6


@pytest.mark.parametrize(
    ("address", "connect"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost:0", "127.0.0.1"),
        pytest.param("[::1]:0", "::1", marks=needs_ipv6),
    ],
)
def test_a_client_gets_through(address: str, connect: str) -> None:
    with listen(address) as server:
        with socket.create_connection((connect, server.getsockname()[1]), 5):
            connection, _ = server.accept()
        connection.close()


def test_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1:0") as first, pytest.raises(OSError):
        listen(f"127.0.0.1:{first.getsockname()[1]}")
