"""Attention at the shapes of one DeepSeek-V3 rank: 16 heads are a TP8 shard, 128 attention on every GPU on its own."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from millrace_kernels import indexer, mla_decode, mla_prefill
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.kv_gather import kv_gather
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_absorb import absorb_q, project_v, project_v_quant
from millrace_kernels.mla_expand import expand_kv, rope_q
from millrace_kernels.mla_qkv import mla_qkv_norm
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import LATENT, NOPE, PAGE, QK, ROPE, ROW, VALUE, Draw, Inputs

from millrace_bench.kernels.case import ANCHORS, Call, Case, candidates

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Q_LORA_RANK = 1536
TRT, SGLANG = "aiconfigurator, TRT-LLM", "aiconfigurator, SGLang 0.5.14"
CONTEXTS = (1024, 2048, 4096, 8192, 32768)
RULES = ("any equals", "any equals, any order")  # FlashInfer's radix select; the second may differ from call to call
DECODE_US = {(heads, batch): us for heads, batch, us in ANCHORS["decode"]}  # at CONTEXTS
FP8_DECODE_US = {(heads, batch, keys): us for heads, batch, keys, us in ANCHORS["fp8_decode"]}
PREFILL_TFLOPS = {(heads, tokens): (tflops, source) for heads, tokens, tflops, source in ANCHORS["prefill"]}
ABSORB_US = ANCHORS["absorb"]


def cases(device: torch.device) -> Iterator[Case]:
    if device.type != "cuda":
        yield from _all(Draw("cpu"), heads=(2,), tokens=(1, 20), batches=(2,), contexts=(70,), prompts=(40,))
        yield from _choices(2, 128, 16, device)
        return
    draw = Draw("cuda", BF16)
    yield from _all(draw, (16, 128), (1, 16, 128, 4096), (1, 32, 128, 256), CONTEXTS, (1024, 2048, 4096, 8192, 16384))
    for num, keys in itertools.product((1, 16, 128), (4096, 16384, 65536)):
        yield from _choices(num, keys, 2048, device)


def _all(
    draw: Draw,
    heads: tuple[int, ...],
    tokens: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    prompts: tuple[int, ...],
) -> Iterator[Case]:
    for num in tokens:
        yield _qkv_norm(draw, num)
        for count in heads:
            yield from _of_heads(draw, num, count)
    for length in dict.fromkeys((contexts[0], contexts[-1])):
        yield from (_gather(draw, length, dtype) for dtype in (draw.dtype, E4M3))
    for count, batch, keys in itertools.product(heads, batches, contexts):
        yield of_decode(draw, count, batch, keys, draw.dtype)
        if batch != 32 and keys not in CONTEXTS[:2] + CONTEXTS[3:4]:
            yield of_decode(draw, count, batch, keys, E4M3)
    for count, num in itertools.product(heads, prompts):
        yield _prefill(draw, count, num, num, causal=True)
    for count in heads:
        yield _prefill(draw, count, prompts[0], 4 * prompts[0], causal=False)


def _calls(op: str, call: Callable[..., object], inputs: Inputs, draw: Draw, size: int) -> dict[str, Call]:
    return candidates(op, functools.partial(call, **inputs), draw.device, size)


def _case(
    op: str, shape: str, call: Callable[..., object], make: Callable[[], Inputs], draw: Draw, size: int, moved: float,
    flops: float = 0, **anchor: Any,
) -> Case:  # fmt: skip
    """`moved` is in elements of the activations' dtype."""
    nbytes = moved * draw.dtype.itemsize
    return Case(op, shape, lambda: _calls(op, call, make(), draw, size), nbytes, flops, **anchor)


def _qkv_norm(draw: Draw, num: int) -> Case:
    make = functools.partial(attention_inputs.mla_qkv_norm, draw, num, Q_LORA_RANK, True, draw.dtype)
    moved = num * (2 * Q_LORA_RANK + 3 * ROW)
    return _case("mla_qkv.mla_qkv_norm", f"T={num}", mla_qkv_norm, make, draw, num, moved)


def _of_heads(draw: Draw, num: int, heads: int) -> Iterator[Case]:
    shape, weight = f"T={num} H={heads}", heads * NOPE * LATENT
    anchor: dict[str, Any] = {}
    if num <= 128 and heads in ABSORB_US:
        anchor = {"anchor_us": ABSORB_US[heads], "anchor": SGLANG + ", torch.bmm"}
    args = (draw, num, heads)
    rows, flops = num * heads, 2 * num * weight
    absorb, moved = functools.partial(attention_inputs.absorb_q, *args), weight + rows * (QK + ROW)
    yield _case("mla_absorb.absorb_q", shape, absorb_q, absorb, draw, num, moved, flops, **anchor)
    project = functools.partial(attention_inputs.project_v, *args)
    moved = weight + rows * (LATENT + VALUE)
    yield _case("mla_absorb.project_v", shape, project_v, project, draw, num, moved, flops, **anchor)
    if num > SMALL_TOKENS:
        yield _case("mla_absorb.project_v_quant", shape, project_v_quant, project, draw, num, moved, flops)
    for op, call, make, width in (
        ("mla_expand.expand_kv", expand_kv, attention_inputs.expand_kv, NOPE + QK),
        ("mla_expand.rope_q", rope_q, attention_inputs.rope_q, 2 * ROPE),
        ("merge_state.merge_state", merge_state, attention_inputs.merge_state, 3 * VALUE),
    ):
        yield _case(op, shape, call, functools.partial(make, *args), draw, num, rows * width)


def _gather(draw: Draw, length: int, kv_dtype: torch.dtype) -> Case:
    starts, lens = (0, 0), (length, length)
    make = functools.partial(attention_inputs.kv_gather, draw, starts, lens, kv_dtype)
    moved = sum(lens) * ROW * (1 + kv_dtype.itemsize / draw.dtype.itemsize)
    return _case("kv_gather.kv_gather", f"2 x {length} {_name(kv_dtype)}", kv_gather, make, draw, sum(lens), moved)


def of_decode(draw: Draw, heads: int, batch: int, keys: int, kv_dtype: torch.dtype, compared: bool = False) -> Case:
    """In a page-major pool, and in one of a layer of its own: pages that lie apart should cost nothing. compared: with
    FlashInfer's.
    """

    def make() -> dict[str, Call]:
        inputs = attention_inputs.mla_decode(draw, (keys,) * batch, 1, heads, kv_dtype)
        inputs["plan"] = mla_decode.plan(inputs["seq_lens"], 1, heads, kv_dtype)
        calls = _calls("mla_decode.mla_decode", mla_decode.mla_decode, inputs, draw, batch)
        if keys == CONTEXTS[2]:
            kv, page_table = attention_inputs.paged(draw, (keys,) * batch, kv_dtype, contiguous=True)
            own = inputs | {"kv": kv, "page_table": page_table}
            calls |= {"contiguous pool": functools.partial(mla_decode.mla_decode, **own)}
        if compared:
            from millrace_bench.kernels.compared import flashinfer_mla

            del inputs["plan"]
            planned = functools.cache(functools.partial(flashinfer_mla.planned, **inputs))
            calls |= {"flashinfer": lambda: planned()()}
        return calls

    fp8 = kv_dtype == E4M3
    us = FP8_DECODE_US.get((heads, batch, keys)) if fp8 else None
    if not fp8 and (heads, batch) in DECODE_US:
        us = DECODE_US[heads, batch][CONTEXTS.index(keys)]
    rows = batch * heads
    return Case(
        "mla_decode.mla_decode",
        f"H={heads} B={batch} L={keys} {_name(kv_dtype)}",
        make,
        batch * keys * ROW * kv_dtype.itemsize + rows * (ROW + LATENT) * draw.dtype.itemsize,
        2 * rows * keys * (ROW + LATENT),
        us,
        TRT + " FlashMLA" if us else "",
        math="fp8" if fp8 else "bf16",
    )


def _prefill(draw: Draw, heads: int, queries: int, keys: int, causal: bool) -> Case:
    def make() -> Inputs:
        inputs = attention_inputs.mla_prefill(draw, (queries,), (keys,), heads, causal, padding=0)
        shape = mla_prefill.Heads(heads, QK, VALUE)
        return inputs | {"plan": mla_prefill.plan((queries,), (keys,), shape, causal, draw.device, draw.dtype)}

    flops = 2 * heads * queries * keys * (QK + VALUE) / (2 if causal else 1)
    tflops, anchor = PREFILL_TFLOPS.get((heads, queries), (0, "")) if causal else (0, "")
    return _case(
        "mla_prefill.mla_prefill",
        f"T={queries} H={heads} {'causal' if causal else f'of {keys} cached'}",
        mla_prefill.mla_prefill,
        make,
        draw,
        queries,
        heads * (queries * (QK + VALUE) + keys * (QK + VALUE)),
        flops,
        anchor_us=flops / tflops / 1e6 if tflops else None,
        anchor=anchor,
    )


def _choices(num: int, keys: int, topk: int, device: torch.device) -> Iterator[Case]:
    """The indexer's: the numbers of the keys alone, and with the pool's rows."""
    for op in ("indexer.top_keys", "indexer.chosen_rows"):
        make = functools.partial(_choice, op, num, keys, topk, device)
        yield Case(op, f"T={num} K={keys}", make, 4.0 * num * (keys + topk), 0.0)


def _choice(op: str, num: int, keys: int, topk: int, device: torch.device) -> dict[str, Call]:
    lens = torch.full((num,), keys, dtype=torch.int32, device=device)
    choice: Inputs = {"logits": torch.randn(num, keys, device=device), "lens": lens, "topk": topk}
    if op == "indexer.chosen_rows":
        table = torch.arange(num * keys // PAGE, dtype=torch.int32, device=device).view(num, -1)
        call = functools.partial(indexer.chosen_rows, **choice, page_table=table, page_size=PAGE, page_rows=PAGE)
        return candidates("indexer.top_keys", call, device, num)
    calls = candidates(op, functools.partial(indexer.top_keys, **choice), device, num)
    if len(calls) > 1:  # FlashInfer is there: whether a rule for equal logits costs anything
        from flashinfer import top_k_ragged_transform as select

        args = choice["logits"], torch.zeros_like(lens), lens, topk
        calls |= {name: functools.partial(select, *args, deterministic=name == "any equals") for name in RULES}
    return calls


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
