"""Warming up a pair: requests through another worker and this one open the connections of all their ranks."""

import asyncio
import functools
from collections.abc import AsyncIterator

import grpc
from millrace.v1 import decode_pb2, prefill_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_common.versions import MOST_REPLICAS, WORKER_API
from millrace_rpc.errors import FieldError, MillraceError, from_rpc_error

from millrace_serve.engine.config import WARM_UP_OUTPUTS
from millrace_serve.engine.core import Route
from millrace_serve.handover.imports import Imports
from millrace_serve.handover.peers import Peer, Peers
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend import convert, warmup
from millrace_serve.worker.frontend.ranks import Ranks
from millrace_serve.worker.frontend.requests import Requests
from millrace_serve.worker.frontend.wakeup import together, within


class Pairs:
    """The workers whose pages this one reads, and with which it has been warmed up."""

    def __init__(self, config: WorkerConfig, ranks: Ranks, requests: Requests, peers: Peers, imports: Imports) -> None:
        self._warmed: frozenset[str] = frozenset()  # epochs
        self._config = config
        self._ranks = ranks
        self._requests = requests
        self._peers = peers
        self._imports = imports

    @property
    def warmed(self) -> frozenset[str]:
        """Epochs of those that are connected."""
        return self._warmed & self._peers.epochs

    async def warm_up(self, source: worker_pb2.KvSourceRef) -> None:
        """Raises MillraceError when the two can never pair, or when a request fails."""
        peer = self._peers.get(source.address, source.epoch)
        try:
            info = await peer.info()
            check_pair(info, source, self._ranks)
        except MillraceError as error:
            if error.reason is Reason.EPOCH_CHANGED:  # the watch may never have met the epoch, nor miss it
                self._peers.drop(peer)
            raise
        pairs = [(theirs, ours) for theirs in range(info.replicas) for ours in range(self._config.dp)]
        async with within(self._config.timeouts.warmup, "warming up the pair"):
            await together(*(self._run(source, peer, theirs, ours, info) for theirs, ours in pairs))
        self._warmed = self.warmed | {source.epoch}

    async def _run(
        self, source: worker_pb2.KvSourceRef, peer: Peer, theirs: int, ours: int, info: worker_pb2.WorkerInfo
    ) -> None:
        """One prompt, computed by replica `theirs` of the other worker and continued by our replica `ours`."""
        own, flexible = self._ranks.ready_info, info.role == worker_pb2.ROLE_FLEXIBLE
        room = min(own.max_context - WARM_UP_OUTPUTS, info.max_context - 1)  # the other worker makes one token
        request = warmup.tiny_request(min(self._config.limits.page_size + 1, room), own.vocab_size, Route.IMPORT)
        wire = worker_pb2.EngineRequest(
            id=convert.attempt_id(request.id), token_ids=request.token_ids, replica=theirs, request_id="warm-up"
        )
        for name in ("max_tokens", "temperature", "seed", "ignore_eos"):
            setattr(wire.sampling, name, getattr(request.sampling, name))
        done = asyncio.Event()
        begin = functools.partial(self._imports.start, request, ours, source)
        try:
            await together(_prefill(peer, wire, flexible, done), self._requests.run_own(request, ours, begin))
        finally:
            done.set()


def check_pair(info: worker_pb2.WorkerInfo, source: worker_pb2.KvSourceRef, ranks: Ranks) -> None:
    if info.epoch != source.epoch:
        raise MillraceError(Reason.EPOCH_CHANGED, f"the process at {source.address} is {info.epoch}")
    if info.protocol != WORKER_API:
        message = f"{source.address} has version {info.protocol} of the worker API, this worker {WORKER_API}"
        raise MillraceError(Reason.LAYOUT_MISMATCH, message)
    if info.replicas > MOST_REPLICAS:
        raise FieldError("replicas", f"of {source.address} is {info.replicas}; the limit is {MOST_REPLICAS}")
    for theirs in (info.layout.fingerprint, source.fingerprint):
        check_layout(theirs, source.address, ranks)


def check_layout(theirs: str, whose: str, ranks: Ranks) -> None:
    """Raises MillraceError unless the KV layout of the other worker has the fingerprint of ours."""
    ours = ranks.ready_info.layout.fingerprint
    if theirs != ours:
        raise MillraceError(
            Reason.LAYOUT_MISMATCH, f"KV layout {theirs or '(empty)'} of {whose} is not this worker's, {ours}"
        )


async def _prefill(peer: Peer, wire: worker_pb2.EngineRequest, flexible: bool, done: asyncio.Event) -> None:
    """Act as the other worker's router for one request: returns with its first token. Raises the request's error."""
    link, field = (decode_pb2.DecodeLinkRequest, "prefill") if flexible else (prefill_pb2.PrefillLinkRequest, "submit")

    async def messages() -> AsyncIterator[decode_pb2.DecodeLinkRequest | prefill_pb2.PrefillLinkRequest]:
        yield link(hello=worker_pb2.LinkHello(epoch=peer.epoch))
        yield link(**{field: prefill_pb2.PrefillRequest(request=wire)})
        await done.wait()

    call = (peer.decode if flexible else peer.prefill).Link(messages())
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
