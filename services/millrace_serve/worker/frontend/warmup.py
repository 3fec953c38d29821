"""Real tiny requests of a worker to itself: one token, a page and a bit, several chunks, several requests at once."""

import asyncio
import random

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.config import WARM_UP_OUTPUTS, EngineConfig
from millrace_serve.engine.core import FinishReason, Request, RequestId, Route, SamplingParams, SequenceOutput, Wait


class Waiter:
    """Owner of one attempt."""

    def __init__(self, route: Route) -> None:
        self._last: asyncio.Future[SequenceOutput] = asyncio.get_running_loop().create_future()
        self._route = route

    def put(self, output: SequenceOutput) -> None:
        if (output.finish is not None or self._route is Route.EXPORT) and not self._last.done():
            self._last.set_result(output)

    def tell(self, wait: Wait) -> None:
        pass  # the warm-up has its own limit

    async def wait(self) -> None:
        """Wait for the last output. Raises MillraceError when the request failed."""
        last = await self._last
        if last.error is not None:
            raise MillraceError(last.error.reason, f"warm-up request failed: {last.error.message}")
        if last.finish is FinishReason.ABORT:
            raise MillraceError(Reason.CANCELLED, "warm-up request was aborted")


def prompt_lengths(config: EngineConfig) -> list[int]:
    longest = min(config.max_model_len - WARM_UP_OUTPUTS, config.usable_pages * config.page_size // 4)
    wanted = (1, config.page_size, config.page_size + 1, 2 * config.page_size + 3, config.max_prefill_tokens + 1)
    return sorted({max(min(length, longest), 1) for length in wanted})


def tiny_request(length: int, vocab_size: int, route: Route) -> Request:
    """A unique prompt, so that no prefix cache answers it."""
    return Request(
        id=RequestId(random.getrandbits(64) | 1, 0),
        token_ids=[random.randrange(vocab_size) for _ in range(length)],
        sampling=SamplingParams(max_tokens=WARM_UP_OUTPUTS, temperature=0.0, ignore_eos=True),
        route=route,
        warms=True,
    )
