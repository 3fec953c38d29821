"""The time to the first token of one long prompt on a worker of R replicas, each on a GPU of its own: computed by one
replica, or by all of them together (limits.context_parallel_tokens). The whole engine runs; V3's widths, random FP8
weights.

    one      a single replica with all experts, on one GPU
    own      R replicas; one computes the prompt, the others compute their experts for it
    shared   R replicas compute the prompt together

`busy`: another replica gets so many prompts of 2,048 tokens at the same time; `others_ms` is when the last one is done.
`kv_error` compares the prompt's pages with those of the first row: root mean square of the difference over that of the
values, of the first layer, the second and the last. Rounding differs with the number of tokens in a step, too: `own`
with several of `--prefill-tokens` says by how much.

millrace bench shared_prompts --ranks 2 --prompt 32768 --prefill-tokens 8192 --layers 12
millrace bench shared_prompts --tiny --prompt 200 --prefill-tokens 64 --layers 2           on a CPU: whether it runs
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from millrace_load.record import Record, print_record
from millrace_serve.engine.cache.kv_pool import KvLayout, KvPool
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import LeaseEnded, Request, RequestId, Route, SamplingParams, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.lockstep.join import join
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.offload.page_copier import PageCopier
from millrace_serve.engine.start.torch_factory import Rank
from millrace_serve.engine.step.device import device_of
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8
from torch import Tensor

from millrace_bench import ranks, v3
from millrace_bench.processes import Ranks, Row
from millrace_bench.shard import breakdown

OTHERS = 2048  # tokens of each prompt of a busy replica
IDLE_S = 5e-5


class Prompts:
    """The prompts of a replica, one after the other or all at once, each until its first token."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine, self.vocab_size = engine, vocab_size
        self.pages: list[int] = []  # of the newest prompt

    def run(self, lengths: list[int]) -> float:
        """Milliseconds until the last first token."""
        started, open_ids = time.perf_counter(), {self._submit(room, length) for room, length in enumerate(lengths)}
        while open_ids:
            for output in self.engine.step().outputs:
                assert output.error is None, output.error
                open_ids.remove(output.id)
                self.pages = list(self.engine._scheduler.requests.live[output.id].pages)
                self.engine.submit(LeaseEnded(output.id))
        return (time.perf_counter() - started) * 1e3

    def leave(self, *, first: bool) -> None:
        """Step with the others until `first` ends the last step of all."""
        if first:
            self.engine.stop()
        while not self.engine.stopped:
            if self.engine.wait_s() != 0.0:
                time.sleep(IDLE_S)
            self.engine.step()

    def _submit(self, room: int, length: int) -> RequestId:
        rng, id = random.Random(length + room), RequestId(room, 0)
        tokens = [rng.randrange(16, self.vocab_size) for _ in range(length)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.engine.submit(Submit(Request(id=id, token_ids=tokens, sampling=params, route=Route.EXPORT)))
        return id


def measure(rank: Rank, limits: dict[str, int], busy: int, args: argparse.Namespace, index: int) -> tuple[Row, Tensor]:
    """The row of replica `index`, and the KV of its last prompt. `limits`: other ones than the rank was loaded with."""
    one = replace(rank, config=rank.config.model_copy(update=limits)).engine()
    prompts = Prompts(one, min(rank.model.vocab_size, 1000))
    if dist.is_initialized():
        dist.barrier()
    way = "one" if args.ranks == 1 else "shared" if limits["context_parallel_tokens"] else "own"
    row: Row = {"way": way, "prefill_tokens": one.config.max_prefill_tokens, "busy": busy}
    if index == 0:
        times = [prompts.run([args.prompt]) for _ in range(1 if busy else 1 + args.repeats)]
        row |= {"ms": round(statistics.median(times[-args.repeats :]), 1), "all_ms": [round(ms, 1) for ms in times]}
        if args.profile and not busy:
            row["kinds_ms"], row["kernels_ms"] = breakdown(lambda: prompts.run([args.prompt]))
    elif index == 1 and busy:
        row["others_ms"] = round(prompts.run([min(OTHERS, args.prompt // 4)] * busy), 1)
    kv = one.pool.view()[prompts.pages].clone()
    prompts.leave(first=index == 0)
    return row, kv


def build(dims: ParallelDims, args: argparse.Namespace, device: torch.device) -> Rank:
    """As a start makes it, but without its profiling runs, which compile for minutes: the first prompt is not
    counted.
    """
    widths: dict[str, Any] = {**v3.V3, **(v3.TINY if args.tiny else {}), "n_routed_experts": args.experts}
    config = ModelConfig(num_hidden_layers=args.layers, **widths)
    experts = ranks.EXCHANGES[args.exchange](config, dims, args, device) if dims.dp > 1 else None
    model = DeepseekV3(RandomWeights(device, torch.bfloat16, FP8), config, dims, experts=experts)
    limits = EngineConfig(
        num_pages=2 * -(-args.prompt // 64) + 64,
        max_model_len=args.prompt + 1,
        max_running=16,
        max_prefill_tokens=max(args.prefill_tokens),
        prefix_cache=False,
    )
    layout = KvLayout(
        page_size=limits.page_size,
        num_layers=config.num_kv_layers,
        dtype="bfloat16",
        latent_width=config.kv_lora_rank,
        rope_width=config.qk_rope_head_dim,
        model_hash="random",
    )
    pool = KvPool.create(layout, limits.num_pages, device)
    runner = TorchRunner(model, pool, limits, config.vocab_size, device_of(device))
    lockstep = Lockstep() if dims.world == 1 else join(dims.rank, dims.tp, dims.dp, dims.exchange)
    return Rank(Role.PREFILL, v3.TOKENIZER, limits, config, pool, runner, lockstep, PageCopier(pool, 0))


def measured(dims: ParallelDims, device: torch.device, args: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(1)
    index, rank = dims.rank, build(dims, args, device)
    rows, first = [], None
    ways = (0, args.prompt // 8) if args.ranks > 1 else (0,)
    for tokens, busy, share in itertools.product(args.prefill_tokens, (0, *args.busy), ways):
        row, kv = measure(rank, {"max_prefill_tokens": tokens, "context_parallel_tokens": share}, busy, args, index)
        first = kv if first is None else first
        if index == 0:
            row["kv_error"] = kv_error(kv, first)
        rows.append(row)
        shown = (f"{key}={value}" for key, value in row.items() if key != "kernels_ms")
        print(f"replica={index}", *shown, sep="  ", flush=True)
    rank.lockstep.close()
    rank.runner.close()
    return rows


def kv_error(found: Tensor, expected: Tensor) -> list[float]:
    """Of the first, the second and the last layer; KV [pages, L, page, W]."""
    layers = [(found[:, i].float(), expected[:, i].float()) for i in (0, 1, -1)]
    return [round(float((a - b).square().mean().sqrt() / b.square().mean().sqrt()), 5) for a, b in layers]


def run(args: argparse.Namespace) -> list[Row]:
    """The long prompt is replica 0's, the others' are replica 1's."""
    both = Ranks(args.ranks, "cpu" if args.tiny else "cuda", timeout_s=120.0)
    owner, *others = both.run(measured, args)
    return [{**other, **row} for row, other in zip(owner, others[0] if others else owner, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="One long prompt on one GPU of a worker, and on all of them.")
    parser.add_argument("--ranks", type=int, default=2, help="1: `one`")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens")
    parser.add_argument("--prefill-tokens", type=int, nargs="+", default=[8192], help="of a replica in a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64, help="of the model")
    parser.add_argument("--busy", type=int, nargs="*", default=[], help="prompts of another replica meanwhile")
    parser.add_argument("--exchange", default="gather", choices=["gather", "peer", "deepep"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="one more prompt under the profiler, by kernel")
    parser.add_argument("--tiny", action="store_true", help="small widths on a CPU, to see that it runs")
    args = parser.parse_args()
    args.decode, args.prefill = [], ["1x4096"]  # the rows that an exchange has room for
    print_record(Record("shared_prompts", vars(args), {"rows": run(args)}))


if __name__ == "__main__":
    main()
