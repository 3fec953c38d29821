"""A router in this process over fake workers, with clients for both of its faces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
from millrace.v1 import admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from millrace_router.main import Router
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

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0

    async def generate(self, prompt: list[int], timeout: float | None = 10, **fields: object) -> Result:
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

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def quiet(self) -> None:
        """Every worker has finished or aborted everything."""
        await self.until(lambda: not any(worker.active for worker in self.workers))
        await self.until(lambda: not self.router.inference.active)
        assert all(worker.in_flight == 0 for worker in self.router.registry.workers.values())
        assert len(self.router.admission) == 0


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
