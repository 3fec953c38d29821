"""A worker that costs nothing: the load behind `bench router`. Speaks the Link and the load stream, computes nothing.

A prefill worker answers each prompt at once. A decode worker steps every `--step-ms`: one message with one token for
each of its sequences, as an engine with that batch would send. The log-probability of a token, if one is asked for, is
the time when it was sent: time.perf_counter() modulo CLOCK_S, which another process of this machine can compare.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from millrace.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from millrace_common.tls_config import Tls
from millrace_common.versions import WORKER_API
from millrace_load.options import CommandLine
from millrace_rpc.server import Server, run
from millrace_rpc.tls import Identity

ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
LENGTH = common_pb2.FINISH_REASON_LENGTH
TOKEN = 98  # "~" of models/tiny, which is nowhere else in an answer
CLOCK_S = 64.0  # a float has 4 µs there


@dataclass(slots=True)
class Sequence:
    id: common_pb2.AttemptId
    position: int
    end: int
    timed: bool  # log-probabilities were asked for

    @classmethod
    def of(cls, request: worker_pb2.EngineRequest) -> "Sequence":
        sampling = request.sampling
        return cls(request.id, request.num_prior_outputs, sampling.max_tokens, sampling.HasField("logprobs"))


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, role: str, step_s: float) -> None:
        self.role, self.step_s = ROLES[role], step_s
        self.epoch = secrets.token_hex(8)

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id=self.epoch,
            epoch=self.epoch,
            role=self.role,
            state=worker_pb2.WORKER_STATE_READY,
            model="fake",
            max_context=1 << 17,
            vocab_size=1 << 17,
            layout=common_pb2.KvLayout(fingerprint="fake"),
            replicas=1,
            tp=1,
            protocol=WORKER_API,
        )

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.LoadSnapshot]:
        while True:
            replica = worker_pb2.ReplicaLoad(capacity=100_000)
            yield worker_pb2.LoadSnapshot(epoch=self.epoch, state=worker_pb2.WORKER_STATE_READY, replicas=[replica])
            await asyncio.sleep(0.5)

    async def Warmup(self, request: Any, context: Any) -> worker_pb2.WarmupResponse:
        return worker_pb2.WarmupResponse()

    async def FreezeGc(self, request: Any, context: Any) -> worker_pb2.FreezeGcResponse:
        return worker_pb2.FreezeGcResponse(processes=1)

    async def Link(self, requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[worker_pb2.LinkResponse]:
        outgoing: asyncio.Queue[worker_pb2.LinkResponse] = asyncio.Queue()
        sequences: dict[tuple[int, int], Sequence] = {}
        tasks = [
            asyncio.create_task(self._read(context, sequences, outgoing)),
            asyncio.create_task(self._steps(sequences, outgoing)),
        ]
        try:
            while True:
                yield await outgoing.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self,
        context: grpc.aio.ServicerContext,
        sequences: dict[tuple[int, int], Sequence],
        outgoing: asyncio.Queue[worker_pb2.LinkResponse],
    ) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            if kind == "hello":
                outgoing.put_nowait(worker_pb2.LinkResponse(welcome=worker_pb2.LinkWelcome(epoch=self.epoch)))
            elif kind == "abort":
                sequences.pop((message.abort.id.room, message.abort.id.attempt), None)
            elif self.role == worker_pb2.ROLE_PREFILL:
                outgoing.put_nowait(_step([_next(Sequence.of(message.submit.request))]))
            else:
                sequence = Sequence.of(message.submit.request)
                sequences[sequence.id.room, sequence.id.attempt] = sequence

    async def _steps(
        self, sequences: dict[tuple[int, int], Sequence], outgoing: asyncio.Queue[worker_pb2.LinkResponse]
    ) -> None:
        async for _ in steps(self.step_s):
            if sequences:
                outgoing.put_nowait(_step([_next(sequence) for sequence in sequences.values()]))
                for key in [key for key, sequence in sequences.items() if sequence.position >= sequence.end]:
                    del sequences[key]


def _step(outputs: list[worker_pb2.SequenceOutput]) -> worker_pb2.LinkResponse:
    return worker_pb2.LinkResponse(outputs=worker_pb2.StepOutputs(outputs=outputs))


def _next(sequence: Sequence) -> worker_pb2.SequenceOutput:
    at = sequence.position
    sequence.position += 1
    finish = LENGTH if sequence.position >= sequence.end else None
    logprobs = [now()] if sequence.timed else []
    return worker_pb2.SequenceOutput(
        id=sequence.id, first_index=at, token_ids=[TOKEN], logprobs=logprobs, finish_reason=finish
    )


def now() -> common_pb2.TokenLogprobs:
    now = time.perf_counter() % CLOCK_S
    return common_pb2.TokenLogprobs(sampled=common_pb2.TokenLogprob(token_id=TOKEN, logprob=now))


async def steps(step_s: float) -> AsyncIterator[None]:
    """One after the other, for ever. Those that a pause was too long for are left out."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + step_s, loop.time())
        await asyncio.sleep(due - loop.time())
        yield


def identity_in(folder: Path) -> Identity:
    """Of a worker or a router, from tls.crt, tls.key and ca.crt."""
    files = {"cert": folder / "tls.crt", "key": folder / "tls.key", "ca": folder / "ca.crt"}
    return Identity(Tls(**files, require_client_cert=True))


def options(about: str | None) -> CommandLine:
    """Of every process that stands for a worker; `about` is its module's docstring."""
    parser = CommandLine("python -m millrace_bench.fake_worker", about and about.splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--announce", type=Path, required=True)
    return parser


def announce(file: Path, ports: dict[str, int]) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(ports))
    partial.replace(file)


async def serve(role: str, step_s: float, announced: Path, tls: Path | None) -> None:
    worker, server = FakeWorker(role, step_s), Server(["millrace.v1.WorkerService"])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.grpc)
    if role == "prefill":
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server.grpc)
    else:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server.grpc)
    identity = None if tls is None else identity_in(tls)
    port = await server.start("127.0.0.1:0", identity)
    announce(announced, {"grpc": port})
    await server.grpc.wait_for_termination()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--tls", type=Path, help="folder with tls.crt, tls.key and ca.crt")
    arguments = parser.parse_args()
    run(serve(arguments.role, arguments.step_ms / 1000, arguments.announce, arguments.tls))


if __name__ == "__main__":
    main()
