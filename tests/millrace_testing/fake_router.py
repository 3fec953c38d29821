"""The router's side of a Link, for tests of workers: submits requests and collects what comes back."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import grpc
from millrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from millrace_rpc.errors import from_rpc_error

from millrace_testing import HANG_S
from millrace_testing.procs import Worker


def request(
    prompt: Sequence[int], *, room: int = 0, attempt: int = 0, salt: bytes = b"", **sampling: Any
) -> worker_pb2.EngineRequest:
    """Greedy and without end of sequence, unless `sampling` says otherwise."""
    sampling = {"temperature": 0.0, "max_tokens": 8, "seed": 1, "ignore_eos": True, **sampling}
    id = common_pb2.AttemptId(room=room or random.getrandbits(63) + 1, attempt=attempt)
    params = common_pb2.SamplingParams(**sampling)
    return worker_pb2.EngineRequest(id=id, token_ids=prompt, sampling=params, cache_salt=salt)


class FakeLink:
    """`async with FakeLink(worker) as link: link.submit(r); outputs = await link.finish(r)`"""

    def __init__(self, worker: Worker, epoch: str = "", router_id: str = "test", cache_key_id: bytes = b"") -> None:
        prefill = worker.role == "prefill"
        self._message = prefill_pb2.PrefillLinkRequest if prefill else decode_pb2.DecodeLinkRequest
        self._stub = (prefill_pb2_grpc.PrefillServiceStub if prefill else decode_pb2_grpc.DecodeServiceStub)(
            worker.channel
        )
        self._hello = worker_pb2.LinkHello(router_id=router_id, epoch=epoch or worker.epoch, cache_key_id=cache_key_id)
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self.outputs: dict[tuple[int, int], list[worker_pb2.SequenceOutput]] = {}
        self.messages = 0
        self.error: grpc.aio.AioRpcError | None = None
        self.closed = False
        self._reading = asyncio.Event()
        self._reading.set()

    async def __aenter__(self) -> Self:
        self._outgoing.put_nowait(self._message(hello=self._hello))
        self._call = self._stub.Link(self._send())
        try:
            first = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        assert first.WhichOneof("message") == "welcome"
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drop()
        await asyncio.gather(self._task, return_exceptions=True)

    def drop(self) -> None:
        """As a router that dies."""
        self._call.cancel()

    def pause(self) -> None:
        """Read nothing more until `resume`."""
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def submit(self, request: worker_pb2.EngineRequest, source: Any = None) -> None:
        """`source`: a KvSourceRef for a decode worker, a KvPrefixRef for a prefill worker."""
        if self._message is prefill_pb2.PrefillLinkRequest:
            self.export(request, source)
        else:
            submit = decode_pb2.DecodeRequest(request=request, source=source)
            self._outgoing.put_nowait(self._message(submit=submit))

    def export(self, request: worker_pb2.EngineRequest, prefix: Any = None) -> None:
        """To a prefill or a flexible worker."""
        field = "submit" if self._message is prefill_pb2.PrefillLinkRequest else "prefill"
        self._outgoing.put_nowait(self._message(**{field: prefill_pb2.PrefillRequest(request=request, prefix=prefix)}))

    def abort(self, request: worker_pb2.EngineRequest) -> None:
        self._outgoing.put_nowait(self._message(abort=worker_pb2.AbortRequest(id=request.id, reason="test")))

    def of(self, request: worker_pb2.EngineRequest) -> list[worker_pb2.SequenceOutput]:
        return self.outputs.get((request.id.room, request.id.attempt), [])

    def tokens(self, request: worker_pb2.EngineRequest) -> list[int]:
        return [token for output in self.of(request) for token in output.token_ids]

    async def first(self, request: worker_pb2.EngineRequest, timeout_s: float = HANG_S) -> worker_pb2.SequenceOutput:
        await self._until(lambda: bool(self.of(request)), timeout_s)
        return self.of(request)[0]

    async def begun(self, request: worker_pb2.EngineRequest) -> worker_pb2.EngineRequest:
        self.submit(request)
        await self.first(request)
        return request

    async def finish(self, request: worker_pb2.EngineRequest, timeout_s: float = HANG_S) -> worker_pb2.SequenceOutput:
        """The final output."""
        await self._until(lambda: any(output.finish_reason for output in self.of(request)), timeout_s)
        assert [bool(output.finish_reason) for output in self.of(request)].count(True) == 1
        return self.of(request)[-1]

    async def end(self, timeout_s: float = HANG_S) -> grpc.aio.AioRpcError | None:
        """Until the stream has ended; its error."""
        await asyncio.wait_for(asyncio.shield(self._task), timeout_s)
        return self.error

    async def _until(self, condition: Any, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition() or self.closed)
        assert condition(), f"the link ended: {self.error}"

    async def _send(self) -> AsyncIterator[Any]:
        while True:
            yield await self._outgoing.get()

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self.messages += 1
                await self._reading.wait()
                for output in response.outputs.outputs:
                    self.outputs.setdefault((output.id.room, output.id.attempt), []).append(output)
                async with self._changed:
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        finally:
            self.closed = True
            async with self._changed:
                self._changed.notify_all()


class FakePair:
    """`async with FakePair(prefill, decode) as both: await both.to_decode.finish(both.submit(request(prompt)))`"""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.to_prefill = FakeLink(prefill)
        self.to_decode = FakeLink(decode)
        self._prefill = prefill

    async def __aenter__(self) -> Self:
        self.source = await self._prefill.source()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.to_prefill)
            await stack.enter_async_context(self.to_decode)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def submit(self, request: worker_pb2.EngineRequest, decode_replica: int | None = None) -> worker_pb2.EngineRequest:
        """To both at once, as a router does. `decode_replica`: None: the same number as the prefill worker's."""
        there = worker_pb2.EngineRequest()
        there.CopyFrom(request)
        there.replica = request.replica if decode_replica is None else decode_replica
        self.to_decode.submit(there, self.source)
        self.to_prefill.export(request)
        return request
