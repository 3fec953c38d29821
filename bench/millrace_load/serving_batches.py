"""Batches of requests, each sent at one moment to an idle server: what a batch size costs as a client sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from millrace_load.clients import Client, Sample
from millrace_load.record import Summary
from millrace_load.sending import send
from millrace_load.workload import Plan, Workload


@dataclass(frozen=True, slots=True)
class Row:
    """One batch. Seconds, tokens per second; NaN where no request was answered."""

    batch: int  # requests
    errors: int
    input_tokens: int
    output_tokens: int
    latency: float  # until the last token of the last request
    ttft: float  # until the last request has its first token
    itl: float  # mean over the requests
    input_throughput: float  # prompt tokens / ttft
    output_throughput: float  # tokens after the first ones / the time after ttft
    overall_throughput: float  # all tokens / latency

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Row":
        good = [sample for sample in samples if sample.answered]
        latency = max((sample.latency for sample in good), default=float("nan"))
        ttft = max((sample.ttft for sample in good), default=float("nan"))
        inputs, outputs = (sum(getattr(sample, name) for sample in good) for name in ("prompt_tokens", "output_tokens"))
        return cls(
            batch=len(samples),
            errors=len(samples) - len(good),
            input_tokens=inputs,
            output_tokens=outputs,
            latency=latency,
            ttft=ttft,
            itl=Summary.of([sample.tpot for sample in good if sample.tpot is not None]).mean,
            input_throughput=inputs / ttft,
            output_throughput=(outputs - len(good)) / (latency - ttft) if latency > ttft else float("nan"),
            overall_throughput=(inputs + outputs) / latency,
        )


async def measure(client: Client, workload: Workload, sizes: Sequence[int], done: Callable[[], None]) -> list[Row]:
    """A batch of each size, one after the other. No two requests have the same prompt."""
    conversations = iter(workload.plan(sum(sizes)).conversations)
    batches = [Plan(tuple(islice(conversations, size))) for size in sizes]
    return [Row.of(await send(client, batch, size, done)) for batch, size in zip(batches, sizes, strict=True)]
