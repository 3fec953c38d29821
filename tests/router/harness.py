"""A router in this process over fake workers, with clients for both of its faces."""

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from millrace.v1 import admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from millrace_router.apis import public_http
from millrace_router.http.guard import HttpGuard
from millrace_router.main import Router
from millrace_testing import HANG_S
from router.fake_worker import DECODE, PREFILL, FakeWorker
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, USER = "<｜begin｜>", "<｜end｜>", "<｜User｜>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ '<｜User｜>' if m.role == 'user' }}{{ m.content }}{% endfor %}"


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, markers: Sequence[str] = ()) -> Path:
    """Byte-level: an id is a position in the sorted alphabet; two merges, "he" and "ll"; three special tokens, and then
    `markers`, which are special too.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"he": 256, "ll": 257}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS, USER, *markers)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Cluster:
    router: Router
    workers: list[FakeWorker]
    public: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceStub
    admin: admin_pb2_grpc.AdminStub
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.ports['http']}"

    @property
    def prefills(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.role == PREFILL]

    @property
    def decodes(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.role == DECODE]

    @functools.cached_property
    def direct(self) -> httpx.AsyncClient:
        """A client of the same HTTP API without a socket, for many requests in a fifth of the time."""
        app = HttpGuard(public_http.build(self.router.inference, None), self.router._keys)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router", timeout=HANG_S)

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0

    async def generate(self, prompt: list[int], timeout: float | None = HANG_S, **fields: object) -> "Result":
        """All that arrived, also when it ended in an error."""
        result = Result()
        sampling = common_pb2.SamplingParams(**{"max_tokens": 8, "seed": 0, **fields.pop("sampling", {})})
        request = inference_pb2.GenerateRequest(
            **{"prompt": inference_pb2.Prompt(token_ids={"ids": prompt}), "sampling": sampling, **fields}
        )
        call = self.stub.Generate(request, timeout=timeout)
        try:
            async for response in call:
                result.responses.append(response)
        except grpc.aio.AioRpcError as error:
            result.error = error
        finally:
            call.cancel()  # gRPC does not where the task is cancelled between the request's end and the first read
        return result

    async def until(self, condition: Callable[[], bool], seconds: float = HANG_S) -> None:
        await until(condition, seconds)

    async def quiet(self) -> None:
        """Every worker has finished or aborted everything, and nothing of it is counted any more."""
        await self.until(lambda: not any(worker.active for worker in self.workers))
        await self.until(lambda: not self.router.inference.active)
        assert all(worker.in_flight == 0 for worker in self.router.registry.workers.values())
        assert len(self.router.admission) == self.metric("millrace_queue_requests") == 0
        assert self.metric("millrace_active_requests") == self.router.registry.health.budget._running == 0

    async def settled(self) -> None:
        """Every worker has reported its load since the latest request ended: no choice depends on when."""
        await self.quiet()
        known = [(worker, worker.load) for worker in self.router.registry.workers.values()]
        for worker in self.workers:
            worker.change()
        await self.until(lambda: not any(worker._sent or worker.load is old for worker, old in known))


def request_of(ids: list[int], max_tokens: int = 8, n: int = 1, **sampling: int) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": max_tokens, "seed": 0, **sampling}
    return inference_pb2.GenerateRequest(prompt={"token_ids": {"ids": ids}}, sampling=sampling, n=n)


async def until(condition: Callable[[], bool], seconds: float = HANG_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def states(made: Cluster, role: str) -> list[float]:
    """How many workers of the role are discovered, healthy and routable."""
    return [made.metric("millrace_workers", role=role, state=state) for state in ("discovered", "healthy", "routable")]


async def becomes(channel: grpc.aio.Channel, wanted: grpc.ChannelConnectivity) -> None:
    """IDLE, for one, when the server has said goodbye."""
    while (state := channel.get_state()) is not wanted:
        await channel.wait_for_state_change(state)


class Result:
    def __init__(self) -> None:
        self.responses: list[inference_pb2.GenerateResponse] = []
        self.error: grpc.aio.AioRpcError | None = None

    def of(self, index: int) -> list[inference_pb2.GenerateResponse]:
        return [response for response in self.responses if response.index == index]

    def tokens(self, index: int = 0) -> list[int]:
        return [token for response in self.of(index) for token in response.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(response.text for response in self.of(index))

    def finish(self, index: int = 0) -> int:
        reasons = [response.finish_reason for response in self.of(index)]
        assert not any(reasons[:-1]), "a finish reason is on the last response only"
        return reasons[-1]


class Timer:
    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """An event loop's times and timers, and a clock to call."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[Timer] = []

    def __call__(self) -> float:
        return self.now

    time = __call__

    def call_at(self, when: float, call: Callable[[], object]) -> Timer:
        self._timers.append(Timer(when, call))
        return self._timers[-1]

    def call_later(self, delay: float, call: Callable[[], object]) -> Timer:
        return self.call_at(self.now + delay, call)

    def run_to(self, when: float) -> None:
        while due := [timer for timer in self._timers if not timer.cancelled and timer.at <= when]:
            timer = min(due, key=lambda timer: timer.at)
            self._timers.remove(timer)
            self.now = timer.at
            timer.call()
        self.now = when


FIRST_KEY, SECOND_KEY = "sk-first-secret-1-0123456789abcdef", "sk-second-secret-2-0123456789abcdef"


def bearer(key: str = FIRST_KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write_keys(folder: Path, first: dict[str, object] | None = None, second: dict[str, object] | None = None) -> str:
    """A file with the keys of two tenants, "one" and "two", who have these settings."""
    keys = [{"name": "one", "key": FIRST_KEY, **(first or {})}, {"name": "two", "key": SECOND_KEY, **(second or {})}]
    (folder / "keys").write_text(json.dumps({"keys": keys}))
    return str(folder / "keys")


def events(text: str) -> list[dict[str, Any]]:
    """The values of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]
