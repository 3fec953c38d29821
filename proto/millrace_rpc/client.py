"""Client channels with the options that our servers expect, and reading a stream that must not fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from millrace_rpc.server import KEEPALIVE, MAX_MESSAGE_BYTES
from millrace_rpc.tls import Identity

T = TypeVar("T")

SLICES = 4  # of a silence, see heard_within
CHANNEL_OPTIONS = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]


def channel(address: str, identity: Identity | None = None) -> grpc.aio.Channel:
    """An own connection to `address`, shared with no other channel of the process, so that its failures are its own.
    Plain without an identity, else TLS with the certificates that the identity has now.
    """
    if identity is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if identity.tls.server_name:
        options.append(("grpc.ssl_target_name_override", identity.tls.server_name))
    return grpc.aio.secure_channel(address, identity.channel_credentials(), options=options)


async def heard_within(silence_s: float, reading: Coroutine[Any, Any, T]) -> T:
    """What a stream's `read()` returns. TimeoutError when the peer was silent for so long, which ends the call.

    The time is counted in slices: a pause of our own process, in which nothing could be heard, costs no more than one.
    """
    read = asyncio.create_task(reading)
    try:
        for _ in range(SLICES):
            done, _ = await asyncio.wait({read}, timeout=silence_s / SLICES)
            if done:
                return read.result()
        raise TimeoutError
    finally:
        read.cancel()
