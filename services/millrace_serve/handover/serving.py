"""KvService: the exports and the prefix fetches of a worker, for others to read."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from millrace.v1 import kv_pb2, kv_pb2_grpc
from millrace_common.page_hash import BLOCK_BYTES
from millrace_rpc.errors import FieldError, MillraceError

from millrace_serve.engine.core import KvChunk, RequestId
from millrace_serve.handover.exports import Export, Exports
from millrace_serve.handover.failed_reads import FailedReads
from millrace_serve.handover.pairing import check_layout
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.links import check_epoch, opening
from millrace_serve.worker.frontend.requests import ABORTED

Context: TypeAlias = grpc.aio.ServicerContext


class KvServicer(kv_pb2_grpc.KvServiceServicer):
    def __init__(self, frontend: Frontend, exports: Exports, failed_reads: FailedReads) -> None:
        self._frontend = frontend
        self._exports = exports
        self._failed_reads = failed_reads

    async def Fetch(
        self, requests: AsyncIterator[kv_pb2.FetchRequest], context: Context
    ) -> AsyncIterator[kv_pb2.FetchResponse]:
        begin: kv_pb2.FetchOpen = await opening(requests, "open", "Fetch")
        id = convert.request_id(begin.id)
        check_epoch(begin.epoch, self._frontend.epoch)
        check_layout(begin.fingerprint, "the reader", self._frontend.ranks)
        if begin.HasField("prefix"):
            id = self._serve_prefix(begin.prefix, context)
        release = asyncio.create_task(self._release(id, requests))
        # a generator that is suspended in a yield does not notice that its call is over
        context.add_done_callback(lambda _: release.cancel())
        export: Export | None = None  # whose memory the reader has not been told
        async for item in self._exports.fetch(id):
            _released(release)
            if isinstance(item, Export):
                export = item
            # A router has named an attempt. Of a prefix fetch, pages show that the reader knows its tokens and salt.
            if export and (not export.prefix_fetch or (isinstance(item, KvChunk) and item.page_ids)):
                memory = self._frontend.ranks.memory_of(export.replica)
                yield kv_pb2.FetchResponse(source=kv_pb2.KvSource(ranks=map(convert.wire_memory, memory)))
                export = None
            if isinstance(item, KvChunk):
                yield kv_pb2.FetchResponse(chunk=convert.wire_chunk(item))
            elif item is None:
                yield kv_pb2.FetchResponse(heartbeat=kv_pb2.Heartbeat())
        if _released(release):
            yield kv_pb2.FetchResponse(release_confirmed=kv_pb2.ReleaseConfirmed())

    def _serve_prefix(self, prefix: kv_pb2.FetchPrefix, context: Context) -> RequestId:
        """Begin a prefix fetch, which ends with the call. Raises MillraceError."""
        self._frontend.requests.check_admission()
        replicas = self._frontend.config.dp
        if prefix.replica >= replicas:
            raise FieldError(("prefix", "replica"), f"is {prefix.replica}; the worker has {replicas}")
        if not prefix.blocks:
            raise FieldError(("prefix", "blocks"), "must not be empty")
        blocks = prefix.blocks[: self._frontend.config.limits.max_pages_per_seq]  # no cached run is longer
        if any(len(block) != BLOCK_BYTES for block in blocks):
            raise FieldError(("prefix", "blocks"), f"must have {BLOCK_BYTES} bytes each")
        id = self._exports.serve_prefix(prefix.replica, blocks)
        context.add_done_callback(lambda _: self._exports.fail(id, ABORTED))
        return id

    async def _release(self, id: RequestId, requests: AsyncIterator[kv_pb2.FetchRequest]) -> bool | MillraceError:
        """Release the pages at the peer's release, which ends the Fetch. Returns whether they were held until then, or
        what is wrong with a message.
        """
        failures_before = self._failed_reads.total
        try:
            async for message in requests:
                if message.HasField("failed"):
                    self._failed_reads.failed(message.failed.reader, failures_before, message.failed.error)
                elif message.HasField("release"):
                    held = self._exports.leases.release(id)
                    if held:
                        self._failed_reads.succeeded()
                    return held
        except (grpc.aio.UsageError, grpc.aio.AbortError):
            pass  # the stream is over
        except MillraceError as malformed:
            return malformed
        return False


def _released(release: asyncio.Task[bool | MillraceError]) -> bool:
    """Whether pages were held until they were released. Raises what is wrong with a message of the reader."""
    answer = release.done() and release.result()
    if isinstance(answer, MillraceError):
        raise answer
    return answer
