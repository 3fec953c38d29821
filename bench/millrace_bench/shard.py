"""One rank of the 671B model on one GPU: all layers, random FP8 weights, local stand-ins for communication.

    tp8   a rank of a TP8 worker: 16 heads, 1/8 of every expert; all-reduces are left out
    ep8   a rank of a DP8/EP8 worker: 128 heads, 32 of 256 experts. What the other ranks would send is stood in for by
          the rank's own tokens: expert e counts as local expert e mod 32, so the rank computes as many rows as it would
          with 8 ranks and balanced routing. It is the engine's step with dp = 8 without its exchange and without
          waiting for other ranks; `bench ranks` times both
    one   all of a model that fits on one GPU

Steps run as CUDA graph replays (decode) or eagerly (prefill), timed by events; a profiled replay gives the time of each
kind of kernel. The floor is what memory and tensor cores need at their peaks. `--attention sparse` is V3.2.

millrace bench shard --shard ep8 --decode 128x4096 256x2048 --prefill 4x4096 16x1024 [--kv-dtype bfloat16 float8_e4m3fn]
millrace bench shard --shard ep8 --decode 1x65536 8x65536 --attention dense sparse        V3.2 beside V3
millrace bench shard --shard ep8 --decode 2x100 --layers 2 --tiny        on a CPU: whether everything runs
"""

import argparse
import functools
import gc
import itertools
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from millrace_kernels import backend
from millrace_kernels.int8 import Matrix
from millrace_load.options import CommandLine, form, number
from millrace_load.record import Record, Row, busiest_gpus, print_record
from millrace_serve.engine.step.device import Replay, device_of
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.experts.held import ExpertLayer
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8, tensors
from millrace_serve.model.sparse_step import IndexPool
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from millrace_bench import v3
from millrace_bench.data import read_data
from millrace_bench.pools import PAGE, model_pool
from millrace_bench.stamps import milliseconds, stamp, synchronize

HBM_BYTES_PER_S, FP8_FLOPS, BF16_FLOPS = 4.8e12, 1979e12, 989e12  # an H200's, by its data sheet
KINDS: list[list[str]] = read_data("kernels.yaml")  # patterns of a kernel's name and what it does, first match


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    dims: ParallelDims
    folded: bool  # the local stand-in for an expert exchange


SHARDS = {
    "tp8": Shard("tp8", ParallelDims(tp=8, expert_tp=True), folded=False),
    "ep8": Shard("ep8", ParallelDims(dp=8), folded=True),
    "one": Shard("one", ParallelDims(), folded=False),  # of a model that fits on one GPU
}


class FoldedExperts(LocalExperts):
    """Stands for an exchange between ranks with balanced routing: every choice lands on an expert of this rank."""

    local = False  # as with an exchange the last layer computes all rows: replicas have agreed on their number

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer)
        self.held.num_experts = len(self.held.w13.data) - self.fuses_shared
        # fmod keeps the sign: -1, the padding, stays -1
        self.held.slots = lambda ids: ids.fmod(self.held.num_experts)  # type: ignore[assignment]


def build(shard: Shard, layers: int, device: torch.device, widths: dict[str, Any] | None = None) -> DeepseekV3:
    """`widths` replaces V3's, for a test."""
    config = ModelConfig(num_hidden_layers=layers, **{**v3.V3, **(widths or {})})
    weights = RandomWeights(device, torch.bfloat16, FP8)
    return DeepseekV3(weights, config, shard.dims, experts=FoldedExperts if shard.folded else None)


# ------------------------------------------------------------------------------------------------ steps


def make_pool(model: DeepseekV3, num_pages: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[num_pages, L, page, C+R] of random rows: attention over equal keys would be a special case. With sparse
    attention index keys lie behind them.
    """
    pool: Tensor = model_pool(model.config, num_pages, dtype, device).view()
    fill(pool)
    if (index := IndexPool.of(pool, model.config)) is not None:
        for data, scales in map(index.layer, range(model.config.num_kv_layers)):
            fill(data)
            assert scales is not None
            scales.fill_(1.0)
    return pool


def fill(pool: Tensor) -> None:
    for page in pool.split(64):
        page.copy_(torch.randn(page.shape, device=pool.device, dtype=torch.bfloat16))


def decode_step(model: DeepseekV3, batch: int, context: int, device: torch.device) -> ForwardInput:
    """One token each of `batch` sequences with `context` keys."""
    return mixed_step(model, [1] * batch, [context] * batch, batch, device)


def prefill_step(model: DeepseekV3, prompts: int, length: int, device: torch.device, cached: int = 0) -> ForwardInput:
    """`length` tokens each of `prompts` sequences, behind `cached` ones."""
    return mixed_step(model, [length] * prompts, [cached + length] * prompts, 0, device)


def mixed_step(
    model: DeepseekV3, q_lens: Sequence[int], seq_lens: Sequence[int], decode: int, device: torch.device
) -> ForwardInput:
    """The last `q_lens` tokens of sequences of `seq_lens` tokens, the first `decode` of which decode."""
    num, rng = sum(q_lens), torch.Generator().manual_seed(0)
    pages = torch.randperm(pages_of(seq_lens), generator=rng) + 1
    table = pad_sequence(pages.split([pages_of([length]) for length in seq_lens]), batch_first=True)
    tokens = torch.randint(0, model.config.vocab_size, (num,), generator=rng)
    inputs = step_inputs(tokens, q_lens, seq_lens, decode, table, device)
    replicas = (num,) * model.dims.dp if model.dims.dp > 1 else ()
    return replace(inputs, dp_num_tokens=replicas, num_tokens=torch.tensor([num], dtype=torch.int32, device=device))


def pages_of(seq_lens: Sequence[int]) -> int:
    return sum(-(-length // PAGE) for length in seq_lens)


def step_inputs(
    tokens: Tensor, q_lens: Sequence[int], seq_lens: Sequence[int], decode: int, table: Tensor, device: torch.device
) -> ForwardInput:
    """Of which each sequence's last row is sampled. tokens: int64 [T]; table: pages of each sequence."""
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(q_lens, seq_lens, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(q_lens)), torch.tensor(q_lens))
    slots = table[owner, positions // PAGE] * PAGE + positions % PAGE
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return ForwardInput(
        token_ids=tokens.to(device),
        positions=positions.to(device),
        kv_slots=slots.to(device),
        attn=AttnPlan(decode, lens, table.int().to(device), tuple(q_lens), tuple(seq_lens)),
        sample_rows=(torch.tensor(q_lens).cumsum(0) - 1).to(device),
    )


def logits(model: DeepseekV3, inputs: ForwardInput, pool: Tensor) -> Tensor:
    return model.logits(model.forward(inputs, pool)[inputs.sample_rows])


def capture(call: Callable[[], object], device: torch.device) -> Replay:
    """The same work again, as one graph where the device has them."""
    where = device_of(device)

    def run() -> None:
        call()

    for _ in range(2):  # what libraries set up in a first run cannot be captured
        call()
    where.synchronize()
    gc.collect()
    gc.disable()
    try:
        return where.capture(run)
    finally:
        gc.enable()


def time_ms(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Each call, back to back."""
    call()
    stamps = [stamp(device)]
    for _ in range(repeats):
        call()
        stamps.append(stamp(device))
    synchronize(device)
    return [milliseconds(start, end) for start, end in itertools.pairwise(stamps)]


def breakdown(call: Callable[[], object]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds by kind of kernel, and of the longest kernels by name, in one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    kinds: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        ms = event.self_device_time_total / 1e3
        names[f"{event.count} x {event.key[:100]}"] += ms
        kinds[kind_of(event.key)] += ms
    return _longest(kinds), _longest(names)


def _longest(times: dict[str, float], count: int = 30) -> dict[str, float]:
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return {name: round(ms, 3) for name, ms in ordered[:count]}


def kind_of(kernel: str) -> str:
    return next((kind for pattern, kind in KINDS if re.search(pattern, kernel)), "other")


# ------------------------------------------------------------------------------------------------ the floor


def floor_ms(model: DeepseekV3, inputs: ForwardInput, kv_bytes: int = 2) -> float:
    """The larger of memory and tensor-core time, summed over linear layers, attention and its indexer. `kv_bytes`: of
    an element.
    """
    config, attn = model.config, inputs.attn
    tokens, heads = len(inputs.token_ids), model.heads.num_heads
    chosen, read, per_token = config.num_experts_per_tok, 0.0, 0.0
    for layer in model.layers:
        weights = [layer.self_attn.q_kv_a_proj, layer.self_attn.q_b_proj, layer.self_attn.kv_b_proj]
        if (indexer := layer.self_attn.indexer) is not None:
            weights += [indexer.wq_b, indexer.wk]
        sizes = [_nbytes(w) for w in (*weights, layer.self_attn.o_proj) if w is not None]
        if isinstance(layer.mlp, Moe):
            own = layer.mlp.routed.held
            experts, held = _nbytes(own.w13) + _nbytes(own.w2), len(own.w13.data) - own.with_shared
            touched = held * (1 - (1 - min(chosen / held, 1)) ** tokens) + 1
            read += experts / (held + own.with_shared) * touched  # the shared expert has the size of a routed one
            per_token += experts / (held + own.with_shared) * (chosen + 1)
        else:
            sizes += [_nbytes(layer.mlp.mlp.gate_up_proj), _nbytes(layer.mlp.mlp.down_proj)]
        read += sum(sizes)
        per_token += sum(sizes)
    head = model.lm_head.weight.nbytes * min(len(inputs.sample_rows), 1)
    linear_s = max((read + head) / HBM_BYTES_PER_S, 2 * per_token * tokens / FP8_FLOPS)
    lens, topk = attn.seq_lens_host, config.index_topk
    sparse = 0 < topk < max(lens)
    absorbed = sparse or set(attn.q_lens_host) == {1}
    width = config.kv_row_dim + config.kv_lora_rank if absorbed else config.qk_head_dim + config.v_head_dim
    pairs = sum(q * (s - (q - 1) / 2) for q, s in zip(attn.q_lens_host, lens, strict=True))
    chosen_pairs = min(pairs, tokens * topk) if sparse else pairs
    keys = sum(min(s, q * topk) if sparse else s for q, s in zip(attn.q_lens_host, lens, strict=True))
    attn_s = 2 * heads * width * chosen_pairs / BF16_FLOPS
    kv_s = keys * config.kv_row_dim * kv_bytes / HBM_BYTES_PER_S
    index_s = sparse * 2 * config.index_n_heads * config.index_head_dim * pairs / FP8_FLOPS
    read_s = sparse * sum(lens) * (config.index_head_dim + 4) / HBM_BYTES_PER_S
    return (linear_s + config.num_hidden_layers * (max(attn_s, kv_s) + max(index_s, read_s))) * 1e3


def _nbytes(matrix: Matrix) -> int:
    return sum(part.nbytes for part in tensors(matrix))


# ------------------------------------------------------------------------------------------------ the runs


def say(text: str) -> None:
    """What goes on, for who waits: the first step of a shape may compile for minutes."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(
    model: DeepseekV3,
    kind: str,
    count: int,
    length: int,
    kv_dtype: str,
    args: argparse.Namespace,
    who: str = "",
    cached: int = 0,
) -> Row:
    """`who`: of this process and of what it measures, on stderr. `cached`: tokens before each prompt."""
    what = f"{who}{kind} {count}x{length} {f'behind {cached} ' * bool(cached)}{kv_dtype}"
    say(f"{what}: the first step, which compiles")
    device = model.rope_tables[0].device
    pool = make_pool(model, count * pages_of([cached + length]) + 1, device, getattr(torch, kv_dtype))
    step_of = decode_step if kind == "decode" else functools.partial(prefill_step, cached=cached)
    inputs = step_of(model, count, length, device)
    step = functools.partial(logits, model, inputs, pool)
    started = time.perf_counter()
    step()
    synchronize(device)
    row: Row = {"shard": args.shard, "kind": kind, "count": count, "length": length, "cached": cached}
    row["kv_dtype"] = kv_dtype
    row["attention"] = "sparse" if model.config.index_topk else "dense"
    row["first_s"] = round(time.perf_counter() - started, 2)
    say(f"{what}: warm-up{' and capture' if kind == 'decode' else ''}, behind a first step of {row['first_s']:.1f} s")
    again: Callable[[], object] = step
    if kind == "decode":
        row["eager_ms"] = round(statistics.median(time_ms(step, 3, device)), 3)
        again = capture(step, device)
    say(f"{what}: measures")
    times = time_ms(again, args.repeats if kind == "decode" else max(args.repeats // 5, 3), device)
    median, floor = statistics.median(times), floor_ms(model, inputs, pool.itemsize)
    row |= {"ms": round(median, 3), "min_ms": round(min(times), 3), "floor_ms": round(floor, 3)}
    row |= {"of_floor": round(floor / median, 3), "tokens_per_s": round(len(inputs.token_ids) / median * 1e3)}
    if device.type == "cuda" and not dist.is_initialized():  # ranks would not take as many steps each
        with busiest_gpus() as gpus:  # a GPU's power is that of its last second
            time_ms(again, int(2e3 / median) + 1, device)
        row |= {"watts": gpus[0]["power_w"], "mhz": gpus[0]["sm_mhz"]}
    if args.profile:
        row["kinds_ms"], row["kernels_ms"] = breakdown(again)
    return row


def runs(model: DeepseekV3, args: argparse.Namespace) -> list[Row]:
    rows = []
    for kind, sizes, before in (("decode", args.decode, [0]), ("prefill", args.prefill, args.cached)):
        for cached, size, kv_dtype, op in itertools.product(before, sizes, args.kv_dtype, ("", *args.reference)):
            count, length = map(int, size.split("x"))
            with backend.forced(**({op: ""} if op else {})):
                row = measure(model, kind, count, length, kv_dtype, args, cached=cached)
            rows.append(row := {"reference": op} | row)
            torch.cuda.empty_cache()
            print({key: value for key, value in row.items() if not key.startswith("kernels")}, flush=True)
    return rows


def main() -> None:
    parser = CommandLine("millrace bench shard", "One rank of the 671B model on one GPU.")
    parser.add_argument("--shard", choices=sorted(SHARDS), required=True)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--decode", nargs="*", default=[], **form("BATCHxCONTEXT", keep=True))
    parser.add_argument("--prefill", nargs="*", default=[], **form("PROMPTSxLENGTH", keep=True))
    parser.add_argument("--cached", nargs="+", default=[0], type=number(int), help="tokens before each prompt")
    parser.add_argument("--kv-dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float8_e4m3fn"])
    parser.add_argument("--attention", nargs="+", default=["dense"], choices=["dense", "sparse"])
    parser.add_argument("--reference", nargs="+", default=[], metavar="OP", help="once more with this op's reference")
    parser.add_argument("--tiny", action="store_true", help="small widths on a CPU, to see that it runs")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="one more step under the profiler, by kernel")
    args = parser.parse_args()
    if any(args.cached) and not args.prefill:
        parser.error("--cached is of --prefill")
    device, rows = torch.device("cpu" if args.tiny else "cuda"), []
    for attention in args.attention:
        widths = (v3.TINY if args.tiny else {}) | (v3.SPARSE if attention == "sparse" else {})
        if args.tiny and attention == "sparse":
            widths["index_topk"] = 64
        model = build(SHARDS[args.shard], args.layers, device, widths)
        synchronize(device)
        say(f"{attention}: {torch.cuda.memory_allocated() / 1e9:.1f} GB of weights")
        rows += runs(model, args)
        del model  # two do not fit
        gc.collect()
        torch.cuda.empty_cache()
    print_record(Record("shard", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
