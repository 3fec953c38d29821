"""What handing a prompt over costs: a prefill and a decode worker as two processes, one prompt at a time.

    transfer   on the decode worker, from the arrival of the last part's page ids to the fenced Release
    handover   in the router, from the prefill worker's first token to the decode worker's first output

The same prompts then run on one unified worker, whose tokens must be equal.

millrace bench handover [--model models/tiny] [--length 1024]
millrace bench handover --engine sim --length 4096 --worker-set sim.token_s=0.00001 limits.max_prefill_tokens=4096
millrace bench handover --widths v3 --layers 6 --length 4096 --worker-set device=cuda memory_fraction=0.42
"""

import argparse
import asyncio
import math
import random
import re
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import httpx
from millrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from millrace_cli.cluster import TINY, ClusterSpec, LocalCluster
from millrace_load.options import SET, CommandLine, checkpoint
from millrace_load.record import Record, Summary, print_record, print_row
from millrace_rpc.client import channel

from millrace_bench import v3

TRANSFER = "millrace_kv_transfer_seconds"
STAGE = r'millrace_stage_seconds_{part}{{stage="kv_transfer"}}'
NEW_TOKENS = 8
PATIENCE_S, POLL_S = 2.0, 0.01


class Histogram:
    """The mean of what one histogram of a /metrics page counted since the last look."""

    def __init__(self, url: str, sum_line: str, count_line: str) -> None:
        self._url, self._lines = url, (sum_line, count_line)
        self._seen = (0.0, 0.0)

    async def since(self, http: httpx.AsyncClient, patience_s: float = 0.0) -> float:
        """Seconds. NaN when nothing was counted, nor is within `patience_s`: a request is counted after its end."""
        deadline = time.monotonic() + patience_s
        while True:
            page = (await http.get(self._url)).text
            total, count = (_value(page, line) - seen for line, seen in zip(self._lines, self._seen, strict=True))
            if count or time.monotonic() >= deadline:
                break
            await asyncio.sleep(POLL_S)
        self._seen = self._seen[0] + total, self._seen[1] + count
        return total / count if count else float("nan")


def _value(page: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


async def generate(stub: inference_pb2_grpc.InferenceStub, prompt: list[int]) -> list[int]:
    request = inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=prompt)),
        sampling=common_pb2.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True),
    )
    return [token async for response in stub.Generate(request, timeout=300) for token in response.token_ids]


async def run(spec: ClusterSpec, prompts: list[list[int]]) -> tuple[list[list[int]], list[float], list[float]]:
    """Tokens, transfer and handover seconds of each prompt; a unified worker has no seconds."""
    tokens, transfers, handovers = [], [], []
    async with LocalCluster(spec) as cluster, httpx.AsyncClient() as http, channel(cluster.grpc_address) as ch:
        stub = inference_pb2_grpc.InferenceStub(ch)
        stages = [STAGE.format(part=part) for part in ("sum", "count")]
        router = Histogram(f"{cluster.http_url}/metrics", *stages)
        decode = None
        if spec.decode:
            url = f"http://{cluster.address('decode-0', 'metrics')}/metrics"
            decode = Histogram(url, f"{TRANSFER}_sum", f"{TRANSFER}_count")
            await decode.since(http)
        await router.since(http)
        for prompt in prompts:
            tokens.append(await generate(stub, prompt))
            if decode is not None:
                transfers.append(await decode.since(http, PATIENCE_S))
                handovers.append(await router.since(http, PATIENCE_S))
    return tokens, transfers, handovers


def main() -> None:
    parser = CommandLine("millrace bench handover", "What handing a prompt over costs.")
    parser.add_argument("--model", type=checkpoint, default=TINY)
    parser.add_argument("--widths", choices=list(v3.WIDTHS), help="use random weights in these shapes")
    parser.add_argument("--layers", type=int, default=6, help="layers of the random weights")
    parser.add_argument("--engine", choices=("model", "sim"), default="model", help="sim: messages without a model")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=1000, help="limit of the drawn token ids")
    parser.add_argument("--worker-set", nargs="*", **SET)
    parser.add_argument("--start-timeout", type=float, help="seconds for the start (default: that of a cluster)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-handover-") as folder:
        model, worker_set = args.model, args.worker_set
        if args.widths:
            model = v3.write_folder(Path(folder) / args.widths, args.widths, args.layers)
            worker_set = ["random_weights=true", *worker_set]
        spec = ClusterSpec(model=model, worker_set=tuple(worker_set), start_timeout_s=args.start_timeout)
        measure(replace(spec, engine=args.engine), args)


def measure(pair_spec: ClusterSpec, args: argparse.Namespace) -> None:
    """The same prompts through the pair, and through one unified worker of the same settings."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, args.vocab) for _ in range(args.length)] for _ in range(args.prompts)]
    pair, transfers, handovers = asyncio.run(run(pair_spec, prompts))
    whole, _, _ = asyncio.run(run(replace(pair_spec, prefill=0, decode=0, unified=1), prompts))
    equal = sum(one == other for one, other in zip(pair, whole, strict=True))
    results = {
        "transfer_ms": asdict(Summary.of(_counted(transfers[1:]))),
        "handover_ms": asdict(Summary.of(_counted(handovers[1:]))),
        "first_transfer_ms": 1e3 * transfers[0],
        "equal_to_unified": equal,
        "prompts": len(prompts),
    }
    print_row(**results)
    print_record(Record("handover", vars(args), results))


def _counted(seconds: list[float]) -> list[float]:
    """In ms. The router counts no hand-over when the decode worker's first output overtakes the prefill worker's."""
    return [1e3 * value for value in seconds if not math.isnan(value)]


if __name__ == "__main__":
    main()
