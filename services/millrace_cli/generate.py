"""`millrace generate`: one prompt, streamed over gRPC."""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field

import grpc
from millrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from millrace_common.reasons import Reason
from millrace_rpc.client import channel
from millrace_rpc.enums import name_of
from millrace_rpc.errors import from_rpc_error
from millrace_rpc.tls import Identity
from rich.console import Console

from millrace_cli import probe, proxies
from millrace_cli.errors import CommandError


@dataclass(slots=True)
class PartialAnswer:
    """The received part of one continuation."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    finish_reason: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0

    def summary(self) -> str:
        rate = (len(self.token_ids) - 1) / max(self.total_s - self.ttft_s, 1e-9)
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_prompt_tokens} cached), {len(self.token_ids)} tokens, "
            f"first after {1000 * self.ttft_s:.0f} ms, then {rate:.0f} tokens/s, finish: {self.finish_reason}"
        )


def request_of(
    prompt: str, chat: bool, max_tokens: int | None, temperature: float | None, seed: int | None
) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    wrapped = {"chat": {"messages": [{"role": "user", "content": prompt}]}} if chat else {"text": prompt}
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(**wrapped), sampling=sampling)


async def stream(
    address: str,
    request: inference_pb2.GenerateRequest,
    on_text: Callable[[str], None],
    identity: Identity | None = None,
    api_key: str = "",
) -> PartialAnswer:
    """Run one request; `on_text` gets every piece of text as it arrives. Raises CommandError for every failure."""
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    answer = PartialAnswer()
    begin = time.perf_counter()
    try:
        async with channel(address, identity, proxy=True) as ch:
            responses: AsyncIterator[inference_pb2.GenerateResponse]
            responses = inference_pb2_grpc.InferenceStub(ch).Generate(request, metadata=metadata)
            async for response in responses:
                now = time.perf_counter() - begin
                answer.ttft_s = answer.ttft_s or (now if response.token_ids else 0.0)
                answer.total_s = now
                answer.text += response.text
                answer.token_ids += response.token_ids
                answer.prompt_tokens = response.usage.prompt_tokens
                answer.cached_prompt_tokens = response.usage.cached_prompt_tokens
                if response.finish_reason:
                    answer.finish_reason = name_of(common_pb2.FinishReason, response.finish_reason)
                if response.text:
                    on_text(response.text)
    except grpc.RpcError as error:
        raise await explain(error, address) from error
    return answer


async def explain(error: grpc.RpcError, address: str) -> CommandError:
    """One line of advice for the user, if there is any. An unreachable server names no reason."""
    if elsewhere := await probe.misdirected(address, error, "a router's gRPC API, port 50051 by default"):
        return CommandError(elsewhere)
    failure = from_rpc_error(error)
    if error.code() is grpc.StatusCode.UNAVAILABLE and failure.reason is Reason.WORKER_LOST:
        advice = "start one with `millrace serve-local`, or give --address"
        return CommandError(f"no server answers at {address}; {advice}{proxies.hint()}")
    return CommandError(str(failure))


async def generate(
    address: str, request: inference_pb2.GenerateRequest, as_json: bool, identity: Identity | None, api_key: str
) -> None:
    """Print the text while it comes and a summary on stderr, or one JSON line at the end."""

    def show(text: str) -> None:
        if not as_json:
            print(text, end="", flush=True)  # not rich's: it would change tabs and control characters

    answer = await stream(address, request, show, identity, api_key)
    if as_json:
        print(json.dumps(asdict(answer), ensure_ascii=False))
    else:
        print()
        Console(stderr=True, highlight=False, soft_wrap=True).print(answer.summary(), style="dim")
