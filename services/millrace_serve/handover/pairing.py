"""Warming up a pair: requests through a prefill worker and this one open the connections of all their ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
from millrace.v1 import prefill_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError, from_rpc_error

from millrace_serve.engine.core import Request, Route
from millrace_serve.handover.imports import Imports
from millrace_serve.handover.peers import Peer
from millrace_serve.worker.frontend import convert, warmup
from millrace_serve.worker.frontend.frontend import PROTOCOL, Frontend
from millrace_serve.worker.frontend.wakeup import within


class Importer(Protocol):
    """What the warm-up of a pair needs of a decode worker's role."""

    frontend: Frontend
    imports: Imports

    @property
    def fingerprint(self) -> str: ...

    async def run_import(self, request: Request, replica: int, source: worker_pb2.KvSourceRef) -> None: ...


async def warm_pair(role: Importer, source: worker_pb2.KvSourceRef) -> None:
    """Raises MillraceError when the two can never pair, or when a request fails."""
    frontend = role.frontend
    peer = role.imports.peer(source)
    info = await peer.info()
    check_pair(info, source, role.fingerprint)
    config = frontend.config
    pairs = [(theirs, ours) for theirs in range(info.replicas) for ours in range(config.dp)]
    async with within(config.timeouts.warmup, "warming up the pair"):
        await asyncio.gather(*(_run(role, source, peer, theirs, ours) for theirs, ours in pairs))
    if source.epoch not in frontend.warmed_sources:
        frontend.warmed_sources.append(source.epoch)


def check_pair(info: worker_pb2.WorkerInfo, source: worker_pb2.KvSourceRef, fingerprint: str) -> None:
    if info.epoch != source.epoch:
        raise MillraceError(Reason.EPOCH_CHANGED, f"the process at {source.address} is {info.epoch}")
    if info.protocol != PROTOCOL:
        message = f"{source.address} speaks protocol {info.protocol}, this worker {PROTOCOL}"
        raise MillraceError(Reason.LAYOUT_MISMATCH, message)
    for theirs in (info.layout.fingerprint, source.fingerprint):
        if theirs != fingerprint:
            message = f"KV layout {theirs or '(empty)'} of {source.address} is not ours, {fingerprint}"
            raise MillraceError(Reason.LAYOUT_MISMATCH, message)


async def _run(role: Importer, source: worker_pb2.KvSourceRef, peer: Peer, theirs: int, ours: int) -> None:
    """One prompt, computed by replica `theirs` of the prefill worker and continued by our replica `ours`."""
    info, config = role.frontend.ranks.info, role.frontend.config
    assert info is not None
    length = min(config.limits.page_size + 1, config.limits.max_model_len - warmup.MAX_TOKENS)
    request = warmup.tiny_request(length, info.vocab_size, Route.IMPORT)
    wire = worker_pb2.EngineRequest(
        id=convert.attempt_id(request.id),
        token_ids=request.token_ids,
        replica=theirs,
        request_id="warm-up",
    )
    wire.sampling.max_tokens = request.sampling.max_tokens
    wire.sampling.temperature = request.sampling.temperature
    wire.sampling.seed = request.sampling.seed
    wire.sampling.ignore_eos = request.sampling.ignore_eos
    done = asyncio.Event()
    prefill = asyncio.create_task(_prefill(peer, wire, role.frontend.epoch, done))
    decode = asyncio.create_task(role.run_import(request, ours, source))
    try:
        await asyncio.gather(prefill, decode)
    finally:
        done.set()
        for task in (prefill, decode):
            task.cancel()


async def _prefill(peer: Peer, wire: worker_pb2.EngineRequest, epoch: str, done: asyncio.Event) -> None:
    """As the prefill worker's router for one request: returns with its first token. Raises what went wrong there."""

    async def messages() -> AsyncIterator[prefill_pb2.PrefillLinkRequest]:
        hello = worker_pb2.LinkHello(router_id=f"warm-up of {epoch}", epoch=peer.epoch)
        yield prefill_pb2.PrefillLinkRequest(hello=hello)
        yield prefill_pb2.PrefillLinkRequest(submit=prefill_pb2.PrefillRequest(request=wire))
        await done.wait()

    call = peer.prefill.Link(messages())
    try:
        async for response in call:
            for output in response.outputs.outputs:
                if output.HasField("failure"):
                    message = f"warm-up request failed on {peer.address}: {output.failure.message}"
                    raise MillraceError(output.failure.reason, message)
                return
        raise MillraceError(Reason.WORKER_LOST, f"{peer.address} closed the link of the warm-up")
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
