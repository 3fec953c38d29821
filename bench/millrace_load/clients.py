"""One streamed request over gRPC or over the OpenAI API, with the time of every piece that arrives."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import httpx
from millrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.errors import from_rpc_error

from millrace_load.workload import Prompt

FINISHES = ("stop", "length")  # of a whole answer
CONNECTIONS = 8  # HTTP/2 allows about 100 streams on one


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    index: int  # of its conversation
    prompt: Prompt
    max_tokens: int
    seed: int
    session: str = ""  # the same for all turns of a conversation


@dataclass(slots=True)
class Sample:
    """What one request did. Times are of time.perf_counter()."""

    due: float  # when it should have been sent: what a late client costs is the client's, and counts
    arrivals: list[float] = field(default_factory=list)  # of messages with tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0  # of these, from the host tier
    fetched_tokens: int = 0  # of these, from another worker
    output_tokens: int = 0
    drafted_tokens: int = 0  # drafts that workers verified
    accepted_tokens: int = 0  # of these
    end: float = 0.0
    error: str = ""  # reason; empty: complete
    turn: int = 0  # of its conversation, from 0
    tokens: list[int] = field(default_factory=list)  # of the answer, where the interface has them
    text: str = ""  # of the answer

    @property
    def answered(self) -> bool:
        return not self.error and bool(self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.due

    @property
    def latency(self) -> float:
        """Until the last message with tokens."""
        return self.arrivals[-1] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None when there is no second."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between consecutive messages with tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """The model behind an address."""

    model: str
    vocab_size: int  # 0: not known
    max_context: int


@dataclass(frozen=True, slots=True)
class Options:
    temperature: float
    ignore_eos: bool


class Client(Protocol):
    async def target(self) -> Target: ...

    async def send(self, job: Job, sample: Sample) -> None:
        """Run the job and fill the sample; failures become `sample.error`."""

    async def num_tokens(self, text: str) -> int | None:
        """Of the text as a prompt. None: longer than any prompt may be."""

    async def close(self) -> None: ...


class GrpcClient:
    def __init__(self, address: str, options: Options) -> None:
        self._channels = [channel(address) for _ in range(CONNECTIONS)]
        self._stubs = [inference_pb2_grpc.InferenceStub(ch) for ch in self._channels]
        self._options = options

    async def target(self) -> Target:
        models = (await self._stubs[0].ListModels(inference_pb2.ListModelsRequest(), timeout=30)).models
        return Target(models[0].name, models[0].vocab_size, models[0].max_context)

    async def send(self, job: Job, sample: Sample) -> None:
        try:
            async for response in self._stubs[job.index % CONNECTIONS].Generate(self._request(job)):
                if response.token_ids:
                    sample.arrivals.append(time.perf_counter())
                    sample.tokens.extend(response.token_ids)
                sample.text += response.text
                sample.prompt_tokens = response.usage.prompt_tokens
                sample.cached_tokens = response.usage.cached_prompt_tokens
                sample.host_cached_tokens = response.usage.host_cached_prompt_tokens
                sample.fetched_tokens = response.usage.fetched_prompt_tokens
                sample.drafted_tokens = response.usage.drafted_tokens
                sample.accepted_tokens = response.usage.accepted_draft_tokens
        except grpc.RpcError as error:
            sample.error = str(from_rpc_error(error).reason)
        sample.output_tokens = len(sample.tokens)
        sample.end = time.perf_counter()

    async def num_tokens(self, text: str) -> int | None:
        request = inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text=text))
        try:
            return len((await self._stubs[0].Tokenize(request)).token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return None
            raise

    def _request(self, job: Job) -> inference_pb2.GenerateRequest:
        if isinstance(job.prompt, str):
            prompt = inference_pb2.Prompt(text=job.prompt)
        else:
            prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=job.prompt))
        sampling = common_pb2.SamplingParams(
            max_tokens=job.max_tokens,
            temperature=self._options.temperature,
            ignore_eos=self._options.ignore_eos,
            seed=job.seed,
        )
        return inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling, session_id=job.session)

    async def close(self) -> None:
        for ch in self._channels:
            await ch.close()


class HttpClient:
    """/v1/completions with server-sent events. An event may carry several tokens: their number comes from `usage`."""

    def __init__(self, url: str, options: Options, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: of every request."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers=headers)
        self._options = options

    async def target(self) -> Target:
        model = (await self._http.get("/v1/models")).raise_for_status().json()["data"][0]
        return Target(model["id"], 0, model["max_model_len"])

    async def send(self, job: Job, sample: Sample) -> None:
        headers = {"x-session-id": job.session} if job.session else {}
        try:
            async with self._http.stream("POST", "/v1/completions", json=self.body(job), headers=headers) as response:
                if response.status_code == httpx.codes.OK:
                    await self._read(response, sample)
                else:
                    sample.error = _reason(await response.aread(), response.status_code)
        except httpx.TransportError as error:
            sample.error = type(error).__name__
        sample.end = time.perf_counter()

    async def num_tokens(self, text: str) -> int | None:
        response = await self._http.post("/tokenize", json={"prompt": text})
        if response.status_code == httpx.codes.BAD_REQUEST:
            return None
        return int(response.raise_for_status().json()["count"])

    def body(self, job: Job) -> dict[str, Any]:
        return {
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": self._options.temperature,
            "ignore_eos": self._options.ignore_eos,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _read(self, response: httpx.Response, sample: Sample) -> None:
        finish = None
        async for event in _events(response):
            if "error" in event:
                sample.error = _reason(event["error"], response.status_code)
                return
            if event["choices"]:
                sample.arrivals.append(time.perf_counter())
                sample.text += event["choices"][0]["text"]
                finish = event["choices"][0].get("finish_reason") or finish
            if usage := event.get("usage"):
                sample.prompt_tokens = usage["prompt_tokens"]
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                sample.output_tokens = usage["completion_tokens"]
                drafts = usage.get("completion_tokens_details") or {}
                sample.accepted_tokens = drafts.get("accepted_prediction_tokens", 0)
                sample.drafted_tokens = sample.accepted_tokens + drafts.get("rejected_prediction_tokens", 0)
        if finish not in FINISHES:
            sample.error = (finish or "cut").upper()

    async def close(self) -> None:
        await self._http.aclose()


def _reason(answer: bytes | dict[str, Any], status: int) -> str:
    """The word of an error, from the shapes that servers give it; of an answer that is no JSON its status."""
    try:
        error = answer if isinstance(answer, dict) else json.loads(answer)
    except ValueError:
        return f"HTTP_{status}"
    while isinstance(error, dict) and "error" in error:
        error = error["error"]
    words = [error.get(key) for key in ("code", "type")] if isinstance(error, dict) else []
    return next((word for word in words if isinstance(word, str) and word), f"HTTP_{status}").upper()


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in _lines(response):
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield json.loads(data)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Without `aiter_lines`, which also ends lines at the line breaks of Unicode within a text."""
    rest = b""
    async for piece in response.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
