"""Times every op over the shapes of `millrace_kernels.testing.cases`; a table, then one JSON line.

python kernels/bench/bench_ops.py [--device cpu] [--dtype float32] [--dims tiny] [--threads 1] [--op mla]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from millrace_kernels.backend import capability
from millrace_kernels.fp8 import dequant_blocks, fp8_linear, quant_blocks, quant_groups
from millrace_kernels.kv_gather import kv_gather
from millrace_kernels.kv_store import kv_store
from millrace_kernels.linear import linear
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_decode import mla_decode
from millrace_kernels.mla_prefill import mla_prefill
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.moe_gate import moe_gate
from millrace_kernels.rms_norm import add_rms_norm, rms_norm
from millrace_kernels.rope import rope
from millrace_kernels.silu_mul import silu_mul
from millrace_kernels.testing.cases import TINY, V3_TP8, Dims
from millrace_kernels.testing.timing import time_us
from torch import Tensor

TOKENS = (1, 16, 128, 512)
DECODE = ((1, 512), (16, 512), (16, 4096))  # batch, keys per sequence
PREFILL = (128, 1024)


@dataclass(frozen=True, slots=True)
class Bench:
    """One call and the least work that it can be: bytes once read or written, floating-point operations."""

    op: str
    shape: str
    call: Callable[[], object]
    nbytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Setup:
    dims: Dims
    device: torch.device
    dtype: torch.dtype

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def width(self) -> int:
        return self.dtype.itemsize


def size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def token_ops(s: Setup, num: int) -> Iterator[Bench]:
    d, name = s.dims, f"T={num}"
    x, weight = s.draw(num, d.hidden), s.draw(d.hidden)
    yield Bench("rms_norm", name, lambda: rms_norm(x, weight, 1e-6), 2 * size(x), 4 * x.numel())
    yield Bench("add_rms_norm", name, lambda: add_rms_norm(x, x, weight, 1e-6), 4 * size(x), 5 * x.numel())
    angles, q_pe = torch.randn(num, d.rope // 2, device=s.device), s.draw(num, d.heads, d.rope)
    yield Bench("rope", name, lambda: rope(q_pe, angles, angles), 2 * size(q_pe) + 2 * size(angles), 3 * q_pe.numel())
    gate_up = s.draw(num, 2 * d.moe_intermediate)
    yield Bench("silu_mul", name, lambda: silu_mul(gate_up), 1.5 * size(gate_up), 3 * gate_up.numel())
    out = num * d.hidden * s.width
    matrix = s.draw(d.hidden, d.hidden)
    yield Bench("linear", name, lambda: linear(x, matrix), size(x, matrix) + out, 2 * num * matrix.numel())
    (x8, x_scales), (w8, w_scales) = quant_groups(x), quant_blocks(matrix)
    yield Bench("quant_groups", name, lambda: quant_groups(x), size(x, x8, x_scales), 2 * x.numel())
    yield Bench(
        "fp8_linear",
        name,
        lambda: fp8_linear(x8, x_scales, w8, w_scales, s.dtype),
        size(x8, x_scales, w8, w_scales) + out,
        2 * num * matrix.numel(),
    )


def moe_ops(s: Setup, num: int) -> Iterator[Bench]:
    d, name = s.dims, f"T={num} E={s.dims.experts}"
    logits, bias = torch.randn(num, d.experts, device=s.device), torch.zeros(d.experts, device=s.device)
    options = {"n_group": d.groups, "topk_group": d.topk_groups, "top_k": d.top_k}
    options |= {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    yield Bench("moe_gate", name, lambda: moe_gate(logits, bias, **options), size(logits), 4 * logits.numel())
    weights, experts = moe_gate(logits, bias, **options)
    w13, w2 = s.draw(d.experts, 2 * d.moe_intermediate, d.hidden), s.draw(d.experts, d.hidden, d.moe_intermediate)
    x, used = s.draw(num, d.hidden), len(experts.unique())
    read = (size(w13, w2) * used) // d.experts + 2 * size(x)
    flops = 6 * num * d.top_k * d.hidden * d.moe_intermediate
    yield Bench("moe_experts", name, lambda: moe_experts(x, weights, experts, w13, w2, 0), read, flops)


def prefill_ops(s: Setup, num: int) -> Iterator[Bench]:
    d, lens = s.dims, (num,)
    q, k, v = (s.draw(num, d.heads, n) for n in (d.nope + d.rope, d.nope + d.rope, d.value))
    pairs, per_pair = num * num, 2 * d.heads * (d.nope + d.rope + d.value)
    for causal in (True, False):
        yield Bench(
            "mla_prefill",
            f"T={num} {'causal' if causal else 'prefix'}",
            lambda causal=causal: mla_prefill(q, k, v, lens, lens, 0.07, causal),
            size(q, k, v) + num * d.heads * d.value * s.width,
            pairs * per_pair / (2 if causal else 1),
        )
    lse = torch.zeros(num, d.heads, device=s.device)
    yield Bench("merge_state", f"T={num}", lambda: merge_state(v, lse, v, lse), 3 * size(v, lse), 4 * v.numel())


def pool_ops(s: Setup, batch: int, keys: int) -> Iterator[Bench]:
    d, name = s.dims, f"B={batch} L={keys}"
    pages = -(-keys // d.page)
    kv = s.draw(batch * pages + 1, 2, d.page, d.kv_row)[:, 1]
    table = (torch.randperm(batch * pages, device=s.device).int() + 1).view(batch, pages)
    lens, q = torch.full((batch,), keys, dtype=torch.int32, device=s.device), s.draw(batch, 1, d.heads, d.kv_row)
    row_bytes = d.kv_row * s.width
    yield Bench(
        "mla_decode",
        name,
        lambda: mla_decode(q, kv, table, lens, 0.07, d.latent),
        batch * keys * row_bytes + 2 * size(q),
        2 * batch * keys * d.heads * (d.kv_row + d.latent),
    )
    starts, counts = [0] * batch, [keys] * batch
    yield Bench("kv_gather", name, lambda: kv_gather(kv, table, starts, counts), 2 * batch * keys * row_bytes, 0)
    rows, slots = s.draw(batch, d.kv_row), table[:, 0].long() * d.page
    c_kv, k_pe = rows[:, : d.latent], rows[:, d.latent :]
    yield Bench("kv_store", name, lambda: kv_store(kv, slots, c_kv, k_pe), 2 * size(rows), 0)


def benches(s: Setup) -> Iterator[Bench]:
    for num in TOKENS:
        yield from token_ops(s, num)
        yield from moe_ops(s, num)
    for num in PREFILL:
        yield from prefill_ops(s, num)
    for batch, keys in DECODE:
        yield from pool_ops(s, batch, keys)
    w8, scales = quant_blocks(s.draw(s.dims.hidden, s.dims.hidden))
    read = size(w8, scales) + w8.numel() * s.width
    yield Bench("dequant_blocks", f"{s.dims.hidden}^2", lambda: dequant_blocks(w8, scales, s.dtype), read, w8.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the ops.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--dims", default="tiny", choices=[TINY.name, V3_TP8.name])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--op", default="", help="only ops whose name contains this")
    args = parser.parse_args()
    dims = {d.name: d for d in (TINY, V3_TP8)}[args.dims]
    setup = Setup(dims, torch.device(args.device), getattr(torch, args.dtype))
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = []
    print(f"{'op':16}{'shape':22}{'us':>12}{'GB/s':>10}{'GFLOPS':>12}")
    for bench in benches(setup):
        if args.op not in bench.op:
            continue
        us = time_us(bench.call, setup.device)
        row = {"op": bench.op, "shape": bench.shape, "us": round(us, 1)}
        row |= {"gb_per_s": round(bench.nbytes / us / 1e3, 2), "gflops": round(bench.flops / us / 1e3, 1)}
        print(f"{bench.op:16}{bench.shape:22}{us:12.1f}{row['gb_per_s']:10.2f}{row['gflops']:12.1f}", flush=True)
        results.append(row)
    where = {"device": args.device, "capability": capability(setup.device), "threads": args.threads}
    print(json.dumps({**where, "dtype": args.dtype, "dims": asdict(dims), "results": results}))


if __name__ == "__main__":
    main()
