"""What gRPC's library takes for a message: a server of Generate for `peers/router.py` that is router and worker at once
and does nothing else. It sends every stream a token in the same turn, once per step of `--step-ms`.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_rpc.server import Server, run

from millrace_bench.fake_worker import TOKEN, announce, now, options, steps


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.step = asyncio.Event()  # another one for each step

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        timed = request.sampling.HasField("logprobs")
        response = inference_pb2.GenerateResponse(text="~", token_ids=[TOKEN])
        for count in range(1, request.sampling.max_tokens + 1):
            if count > 1:
                await self.step.wait()
            response.usage.completion_tokens = count
            if timed:
                del response.logprobs[:]
                response.logprobs.append(now())
            yield response


async def serve(step_s: float, announced: Path) -> None:
    inference, server = Inference(), Server(["millrace.v1.Inference"])
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server.grpc)
    announce(announced, {"grpc": await server.start("127.0.0.1:0")})
    async for _ in steps(step_s):
        step, inference.step = inference.step, asyncio.Event()
        step.set()


def main() -> None:
    arguments = options(__doc__).parse_args()
    run(serve(arguments.step_ms / 1000, arguments.announce))


if __name__ == "__main__":
    main()
