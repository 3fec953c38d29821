"""Systems behind an address: gRPC, or OpenAI-compatible HTTP. Neither scores prompts, so they have no perplexity."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx
from millrace.v1 import common_pb2, inference_pb2
from millrace_cli.errors import CommandError
from millrace_cli.generate import stream

from millrace_bench.eval.backend import Answer, Done, Job, Perplexity

TIMEOUT_S = 600.0  # of one HTTP request


class _Remote:
    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    async def _all(self, jobs: Sequence[Job], one: Callable[[Job], Awaitable[Answer]], done: Done) -> list[Answer]:
        places = asyncio.Semaphore(self._concurrency)

        async def run(job: Job) -> Answer:
            async with places:
                answer = await one(job)
            done()
            return answer

        return await asyncio.gather(*(run(job) for job in jobs))

    async def perplexity(self) -> Perplexity | None:
        return None


class GrpcBackend(_Remote):
    def __init__(self, address: str, concurrency: int) -> None:
        super().__init__(concurrency)
        self.address = address

    async def answer(self, jobs: Sequence[Job], done: Done) -> list[Answer]:
        return await self._all(jobs, self._one, done)

    async def _one(self, job: Job) -> Answer:
        turns = [inference_pb2.ChatMessage(role=role, content=content) for role, content in job.item.messages]
        request = inference_pb2.GenerateRequest(
            prompt=inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=turns)),
            sampling=common_pb2.SamplingParams(
                max_tokens=job.item.max_tokens, temperature=job.temperature, seed=job.seed
            ),
        )
        try:
            got = await stream(self.address, request, lambda text: None)
        except CommandError as error:
            return Answer(error=str(error))
        tokens = tuple(got.token_ids)
        return Answer(got.text, tokens, got.prompt_tokens, got.cached_prompt_tokens, len(tokens))


class HttpBackend(_Remote):
    """`client` has the server's URL as its base."""

    def __init__(self, client: httpx.AsyncClient, concurrency: int) -> None:
        super().__init__(concurrency)
        self._client = client
        self._model = ""

    async def answer(self, jobs: Sequence[Job], done: Done) -> list[Answer]:
        """CommandError when the server cannot say which model it serves."""
        self._model = self._model or await self._served_model()
        return await self._all(jobs, self._one, done)

    async def _served_model(self) -> str:
        try:
            return str((await self._client.get("/v1/models")).raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise CommandError(f"no OpenAI server answers at {self._client.base_url}: {error}") from error

    async def _one(self, job: Job) -> Answer:
        body = {
            "model": self._model,
            "messages": [message._asdict() for message in job.item.messages],
            "max_tokens": job.item.max_tokens,
            "temperature": job.temperature,
            "seed": job.seed,
        }
        try:
            response = await self._client.post("/v1/chat/completions", json=body, timeout=TIMEOUT_S)
            if response.status_code != httpx.codes.OK:
                return Answer(error=f"HTTP {response.status_code}: {response.text[:300]}")
            got = response.json()
            text, usage = got["choices"][0]["message"]["content"], got["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return Answer(text or "", (), usage["prompt_tokens"], cached, usage["completion_tokens"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return Answer(error=f"{type(error).__name__}: {error}")
