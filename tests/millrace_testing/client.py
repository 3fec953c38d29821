"""A client of the public gRPC API, as the end-to-end tests need it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from millrace.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.tls import Identity

from millrace_testing import HANG_S


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens so far)

    @property
    def sampled(self) -> list[float]:
        """Log-probabilities of the tokens."""
        return [entry.sampled.logprob for entry in self.logprobs]


class Client:
    """`async with Client(address) as client: answer = await client.generate([1, 2, 3], max_tokens=8)`"""

    def __init__(
        self, address: str, admin: str | None = None, identity: Identity | None = None, token: str = ""
    ) -> None:
        """`token`: for the admin port."""
        self._channel = channel(address, identity)
        self._admin_channel = channel(admin, token=token) if admin else None
        self.stub = inference_pb2_grpc.InferenceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminStub(self._admin_channel) if self._admin_channel else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        if self._admin_channel:
            await self._admin_channel.close()

    def stream(
        self, prompt: list[int] | str, *, timeout: float = HANG_S, stop: Sequence[str] = (), name: str = "", **more: Any
    ) -> grpc.aio.UnaryStreamCall:
        """A cancellable call object. Greedy unless `temperature` is given. `name`: the request's id."""
        more.setdefault("temperature", 0.0)
        wrapped = inference_pb2.Prompt(text=prompt) if isinstance(prompt, str) else None
        if wrapped is None:
            wrapped = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt))
        request = inference_pb2.GenerateRequest(
            prompt=wrapped, sampling=common_pb2.SamplingParams(**more), stop=stop, request_id=name
        )
        return self.stub.Generate(request, timeout=timeout)

    async def placement(self, name: str) -> admin_pb2.PlacementDecision:
        """The only one of a request."""
        (found,) = (await self.admin.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=name))).placements
        return found

    async def generate(self, prompt: Sequence[int] | str, **options: Any) -> Answer:
        answer, call = Answer(), self.stream(prompt, **options)
        try:
            async for chunk in call:
                collect(answer, chunk)
        finally:
            call.cancel()  # gRPC does not where the task is cancelled between the request's end and the first read
        return answer

    async def wait_whole(self, timeout: float = HANG_S) -> list[admin_pb2.WorkerStatus]:
        """Until no worker holds anything: every page is free or an idle cache page. Fails with the loads otherwise."""
        assert self.admin is not None
        deadline = time.monotonic() + timeout
        while True:
            workers = (await self.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
            if all(map(is_whole, workers)):
                return list(workers)
            assert time.monotonic() < deadline, f"pools are not whole: {[w.load for w in workers]}"
            await asyncio.sleep(0.02)


def collect(answer: Answer, chunk: inference_pb2.GenerateResponse) -> None:
    answer.tokens += chunk.token_ids
    answer.text += chunk.text
    answer.logprobs += chunk.logprobs
    answer.arrivals.append((time.monotonic(), len(answer.tokens)))
    answer.usage = chunk.usage
    if chunk.finish_reason:
        answer.finish = common_pb2.FinishReason.Name(chunk.finish_reason).removeprefix("FINISH_REASON_").lower()


def is_whole(worker: admin_pb2.WorkerStatus) -> bool:
    return bool(worker.load.replicas) and all(
        r.pages_free + r.pages_cached == r.pages_total
        and not (r.running or r.waiting or r.importing or r.exporting or r.pages_published or r.pages_running)
        for r in worker.load.replicas
    )


async def until(condition: Callable[[], bool], timeout: float = HANG_S, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for: {what}"
        await asyncio.sleep(0.01)
