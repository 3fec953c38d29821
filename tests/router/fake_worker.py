"""A worker of any role without an engine: real gRPC, scripted behaviour, and tokens from an oracle.

A behaviour says what a submitted request is answered with: an async generator of SequenceOutputs. Each in `script` is
used for one request; without any, `normal`.
"""

import asyncio
import collections
import contextlib
import secrets
import weakref
import zlib
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

import grpc
from millrace.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from millrace_common.reasons import Reason
from millrace_common.versions import WORKER_API
from millrace_rpc.access import Access
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import Server

PREFILL, DECODE, UNIFIED = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_UNIFIED
FLEXIBLE = worker_pb2.ROLE_FLEXIBLE
READY = worker_pb2.WORKER_STATE_READY
VOCAB, CONTEXT, MODEL = 300, 512, "tiny"
Outputs = AsyncIterator[worker_pb2.SequenceOutput]
Behaviour = Callable[["FakeWorker", worker_pb2.EngineRequest], Outputs]


def oracle(prompt: list[int], position: int, seed: int = 0) -> int:
    """The id of a lower-case letter (byte-level ids 64 to 89 of the test tokenizer), by prompt, seed and position."""
    return 64 + zlib.crc32(f"{prompt} {position} {seed}".encode()) % 26


def expected(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    return [oracle(prompt, i, seed) for i in range(length)]


def prompt_of(request: worker_pb2.EngineRequest) -> list[int]:
    return list(request.token_ids)[: len(request.token_ids) - request.num_prior_outputs]


def output(request: worker_pb2.EngineRequest, first: int, count: int = 1, finish: int = 0) -> worker_pb2.SequenceOutput:
    """The oracle's tokens from position `first` on."""
    prompt = prompt_of(request)
    ids = [oracle(prompt, i, request.sampling.seed) for i in range(first, first + count)]
    logprobs = []
    if request.sampling.HasField("logprobs"):
        tops = [common_pb2.TokenLogprob(token_id=64 + i, logprob=-1.5) for i in range(request.sampling.logprobs)]
        for token in ids:
            sampled = common_pb2.TokenLogprob(token_id=token, logprob=-0.5)
            logprobs.append(common_pb2.TokenLogprobs(sampled=sampled, top=tops))
    return worker_pb2.SequenceOutput(
        id=request.id, first_index=first, token_ids=ids, logprobs=logprobs, finish_reason=finish
    )


def failure(request: worker_pb2.EngineRequest, reason: str) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(
        id=request.id,
        finish_reason=common_pb2.FINISH_REASON_ERROR,
        failure=common_pb2.Failure(reason=reason, message=f"scripted {reason}"),
    )


def behaviour(says: Callable[..., Outputs]) -> Callable[..., Behaviour]:
    """Called with the further arguments, it makes a Behaviour."""
    return lambda *given, **named: lambda worker, request: says(worker, request, *given, **named)


async def normal(worker: "FakeWorker", request: worker_pb2.EngineRequest) -> Outputs:
    start, end = request.num_prior_outputs, request.sampling.max_tokens
    if worker.role == PREFILL or (request.id.room, request.id.attempt) in worker.exports:
        yield output(request, start, finish=common_pb2.FINISH_REASON_LENGTH if start + 1 == end else 0)
        return
    for i in range(start, end):
        await asyncio.sleep(worker.step_s)
        yield output(request, i, finish=common_pb2.FINISH_REASON_LENGTH if i + 1 == end else 0)


@behaviour
async def fails(worker: "FakeWorker", request: worker_pb2.EngineRequest, reason: str, after: int = 0) -> Outputs:
    """`after` tokens, then an error."""
    for i in range(after):
        yield output(request, request.num_prior_outputs + i)
    yield failure(request, reason)


@behaviour
async def hangs(worker: "FakeWorker", request: worker_pb2.EngineRequest, after: int = 0) -> Outputs:
    """`after` tokens, then nothing until it is aborted."""
    for i in range(after):
        yield output(request, request.num_prior_outputs + i)
    await asyncio.Event().wait()


@behaviour
async def waits(worker: "FakeWorker", request: worker_pb2.EngineRequest, go: asyncio.Event, after: int) -> Outputs:
    """`after` tokens; the rest once the event is set."""
    for i in range(request.num_prior_outputs, request.sampling.max_tokens):
        if i == after:
            await go.wait()
        last = i + 1 == request.sampling.max_tokens
        yield output(request, i, finish=common_pb2.FINISH_REASON_LENGTH if last else 0)


@behaviour
async def dies(worker: "FakeWorker", request: worker_pb2.EngineRequest, after: int = 0) -> Outputs:
    """`after` tokens, then the worker's process is gone."""
    for i in range(after):
        yield output(request, request.num_prior_outputs + i)
    await asyncio.sleep(0.01)
    worker.dying = asyncio.create_task(worker.stop())
    await asyncio.Event().wait()


class FakeWorker(
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    at: ClassVar = weakref.WeakValueDictionary[str, "FakeWorker"]()

    def __init__(self, role: int, capacity: int = 64, layout: str = "layout-a", step_s: float = 0.0) -> None:
        self.role, self.capacity, self.layout, self.step_s = role, capacity, layout, step_s
        self.counts: dict[str, int | list[int]] = {}  # of its load
        self.model, self.weights = MODEL, "weights-a"
        self.context = CONTEXT
        self.epoch = secrets.token_hex(4)
        self.state, self.busy, self.starved = READY, False, 0.0
        self.protocol = WORKER_API
        self.address = ""
        self.script: collections.deque[Behaviour] = collections.deque()
        self.submitted: list[worker_pb2.EngineRequest] = []
        self.sources: list[worker_pb2.KvSourceRef | None] = []
        self.came = collections.defaultdict[tuple[int, int], asyncio.Event](asyncio.Event)
        self.exports: set[tuple[int, int]] = set()  # what a flexible worker was told to prefill
        self.duty, self.duties = worker_pb2.DUTY_UNSPECIFIED, []  # what it was told
        self.duty_failures: collections.deque[str] = collections.deque()
        self.aborted: list[tuple[int, int]] = []
        self.active: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.warmups: list[str] = []
        self.warmup_failures: collections.deque[str] = collections.deque()
        self.freezes = 0
        self.drained = False
        self.profiling: float | None = None  # max_seconds
        self.silent = False
        self.links: list[asyncio.Queue] = []
        self.hellos: list[worker_pb2.LinkHello] = []
        self.linked: dict[int, worker_pb2.LinkHello] = {}  # by the identity of the open link
        self.dying: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # another one for every change
        self._server: Server | None = None
        self.access = Access(None, b"")  # for everybody

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = Server(["millrace.v1.WorkerService"], [self.access])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.grpc)
        if self.role == PREFILL:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server.grpc)
        else:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server.grpc)
        self.address = f"127.0.0.1:{await self._server.start(address)}"
        self.at[self.address] = self
        return self.address

    async def stop(self) -> None:
        """At once, like a killed process."""
        for task in self.active.values():
            task.cancel()
        self.active.clear()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def restart(self) -> None:
        """Another process at the same address."""
        await self.stop()
        self.epoch = secrets.token_hex(4)
        await self.start(self.address)

    def change(self, **values: object) -> None:
        """Change what WatchLoad reports, and report it."""
        for name, value in values.items():
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def tell(self, id: common_pb2.AttemptId, *, over: bool) -> None:
        """Say that a request waits here, or goes on."""
        waits = [worker_pb2.Wait(id=id, over=over)]
        for link in self.links:
            link.put_nowait(worker_pb2.LinkResponse(outputs=worker_pb2.StepOutputs(waits=waits)))

    # ------------------------------------------------------------------------------------- WorkerService

    async def GetInfo(self, request, context):
        return worker_pb2.WorkerInfo(
            worker_id=self.epoch,
            epoch=self.epoch,
            role=self.role,
            state=self.state,
            model=self.model,
            max_context=self.context,
            vocab_size=VOCAB,
            layout=common_pb2.KvLayout(fingerprint=self.layout, model=self.weights, page_size=64),
            weights_version=self.weights.removeprefix("weights-"),
            replicas=1,
            tp=1,
            protocol=self.protocol,
            prefix_cache=True,
        )

    async def WatchLoad(self, request, context):
        while True:
            changed = self._changed
            if not self.silent:
                load = {"capacity": self.capacity, "running": len(self.active), "pages_free": 1000} | self.counts
                replica = worker_pb2.ReplicaLoad(**load)
                yield worker_pb2.LoadSnapshot(
                    epoch=self.epoch,
                    state=self.state,
                    replicas=[replica],
                    busy=self.busy,
                    starved=self.starved,
                    duty=self.duty,
                    routers=sorted(hello.router_id for hello in self.linked.values()),
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await changed.wait()

    async def Warmup(self, request, context):
        if self.warmup_failures:
            raise MillraceError(self.warmup_failures.popleft(), "scripted")
        self.warmups.append(request.source.epoch)
        return worker_pb2.WarmupResponse(seconds=0.1)

    async def FreezeGc(self, request, context):
        self.freezes += 1
        return worker_pb2.FreezeGcResponse(processes=2, frozen_objects=1000)

    async def FlushCache(self, request, context):
        return worker_pb2.FlushCacheResponse(pages=7)

    async def SetDuty(self, request, context):
        if self.duty_failures:
            raise MillraceError(self.duty_failures.popleft(), "scripted")
        self.duties.append(request)
        self.change(duty=request.duty)
        return worker_pb2.SetDutyResponse()

    async def StartProfile(self, request, context):
        self.profiling = request.max_seconds
        return worker_pb2.StartProfileResponse(folder="/traces")

    async def StopProfile(self, request, context):
        if self.profiling is None:
            raise MillraceError(Reason.NOT_FOUND, "no profile was started")
        self.profiling = None
        return worker_pb2.StopProfileResponse(paths=["/traces/rank0.json.gz"])

    async def Drain(self, request, context):
        self.drained = True
        return worker_pb2.DrainResponse(aborted=0)

    # ------------------------------------------------------------------------------------- Link

    async def Link(self, requests, context):
        if self.state != READY:
            raise MillraceError(Reason.NOT_READY, "not ready")
        outgoing: asyncio.Queue[worker_pb2.LinkResponse] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()  # a link may end when the worker's next one has work already
        reader = asyncio.create_task(self._read(context, outgoing, tasks))
        self.links.append(outgoing)
        try:
            while True:
                yield await outgoing.get()
        finally:
            self.links.remove(outgoing)
            self.linked.pop(id(outgoing), None)
            self.change()
            reader.cancel()
            for task in tasks:
                task.cancel()
            self.active = {key: task for key, task in self.active.items() if task not in tasks}

    async def _read(self, context, outgoing, tasks):
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(message.hello)
                self.linked[id(outgoing)] = message.hello
                self.change()
                outgoing.put_nowait(worker_pb2.LinkResponse(welcome=worker_pb2.LinkWelcome(epoch=self.epoch)))
            elif kind in ("submit", "prefill"):
                request = getattr(message, kind).request
                self.submitted.append(request)
                imports = self.role in (DECODE, FLEXIBLE) and kind == "submit" and message.submit.HasField("source")
                self.sources.append(message.submit.source if imports else None)
                key = request.id.room, request.id.attempt
                self.came[key].set()
                if kind == "prefill":
                    self.exports.add(key)
                self.active[key] = asyncio.create_task(self._work(key, request, outgoing, self.sources[-1]))
                tasks.add(self.active[key])
            else:
                key = message.abort.id.room, message.abort.id.attempt
                self.aborted.append(key)
                if task := self.active.pop(key, None):
                    task.cancel()
                    end = worker_pb2.SequenceOutput(id=message.abort.id, finish_reason=common_pb2.FINISH_REASON_ABORT)
                    step = worker_pb2.StepOutputs(outputs=[end])
                    outgoing.put_nowait(worker_pb2.LinkResponse(outputs=step))

    async def _work(self, key, request, outgoing, source):
        if source and (prefill := self.at.get(source.address)):
            await prefill.came[key].wait()  # no sequence goes on without its KV
        behave = self.script.popleft() if self.script else normal
        async for out in behave(self, request):
            outgoing.put_nowait(worker_pb2.LinkResponse(outputs=worker_pb2.StepOutputs(outputs=[out])))
        self.active.pop(key, None)
