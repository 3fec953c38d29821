"""The last column of docs/seeds.md: what the runs say of each optimisation. The other columns are written there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from millrace_bench.common import ROOT
from millrace_bench.figures_source import RESULTS, Blocks, results, row, short, source

DOCUMENT = ROOT / "docs" / "seeds.md"
ALONE = ("G8", "M2", "M3", "M5", "M9", "A4", "A6", "A11", "X3", "X4")  # figures from ONOFF alone
ONOFF = "h200/onoff"  # of `python -m millrace_bench.onoff`, or of the stage `onoff` of `millrace bench gpu`
DENSE, MOE, ATTENTION = "h200/kernels-dense", "h200/kernels-moe", "h200/kernels-attention"
TP8_TABLES = "h200/tune_moe_tp8"


def lines(text: str) -> Iterator[list[str]]:
    """The cells of every line of the table that is about an optimisation."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0][:1].isupper() and cells[0] == cells[0].upper():
            yield cells


def seeds() -> str:
    """The table as it is, with the last column made anew."""
    block = DOCUMENT.read_text().partition("<!-- figures: seeds -->\n")[2].partition("<!-- end of figures -->")[0]
    found = []
    for line in block.splitlines():
        for cells in lines(line):
            if figure := FIGURES.get(cells[0]):
                line = f"{line.rsplit('|', 2)[0]}| {figure()} |"
        found.append(line + "\n")
    return "".join(found)


def onoff(seed: str, run: str = "") -> str:
    run = run or ONOFF
    if not (ROOT / RESULTS / f"{run}.json").exists():
        return f"not measured: `python -m millrace_bench.onoff {seed}`"
    found = [one for one in results(run)["rows"] if one["seed"] == seed and "failed" not in one]
    times = [f"{one['shape']}: {short(one['off_us'])} → {short(one['on_us'])}" for one in found]
    return f"{'; '.join(times)} {source(run)}" if times else "failed when it was measured"


def _us(run: str, op: str, shape: str, impl: str) -> str:
    return short(row(run, op=op, shape=shape, impl=impl)["us"])


def products() -> str:
    few, many = "T=128 24576x1536 q_b", "T=4096 24576x1536 q_b"
    op = "fp8.fp8_linear"
    first = [_us(DENSE, op, few, impl) for impl in ("bf16 weight", "lib.deep_gemm", "triton.fp8_linear")]
    second = [_us(DENSE, op, many, impl) for impl in ("bf16 weight", "lib.deep_gemm", "triton.fp8_linear")]
    names = "BF16, DeepGEMM, ours"
    return f"24,576 × 1,536, {names}: {', '.join(first)} (128 rows); {', '.join(second)} (4,096) {source(DENSE)}"


def compiled_ahead() -> str:
    cold, warm = (row("h200/startup", caches=caches)["ready_s"] for caches in ("cold", "warm"))
    return f"start of a TP8 rank, empty → full caches: {cold:.0f} → {warm:.0f} s {source('h200/startup')}"


def tuned_products() -> str:
    found = row("h200/tune_mid", tokens=128, n=24576, k=1536)
    best = min(one["us"] for one in found["times"])
    text = f"24,576 × 1,536, 128 rows: DeepGEMM {short(found['deep_gemm_us'])}, best of ours {short(best)}"
    return f"{text} {source('h200/tune_mid')}"


def quantisation() -> str:
    shape = "T=4096 7168"
    before, after = (_us(DENSE, "fp8.quant_groups", shape, impl) for impl in ("one group a program", "triton.quant"))
    return f"4,096 × 7,168, one group a program → tiles: {before} → {after} {source(DENSE)}"


def accuracy() -> str:
    right = [row("h200/eval-matrix", system=one)["all"]["correct"] for one in ("engine BF16", "engine FP8", "CPU FP8")]
    return f"right of 280: BF16 {right[0]}, FP8 {right[1]}, on a CPU {right[2]} {source('h200/eval-matrix')}"


def switched() -> str:
    """Of a system that ran more than once, the latest run."""
    runs = ("h100/eval-matrix", "h100/eval-matrix-ranks-first", "h100/eval-matrix-ranks")
    found = {one["system"]: one["all"] for run in runs for one in results(run)["rows"]}
    lost = [f"{system} {of['correct']} of {of['items']}" for system, of in found.items() if of["correct"] < of["items"]]
    wrong = ", ".join(lost) or "none"
    return f"H100s, {len(found)} rows; rows with wrong items: {wrong} {', '.join(map(source, runs))}"


def absorbed_products() -> str:
    times = dict(row("h200/tune_attention", op="absorb_q of many", shape="T=128 H=16")["us"])
    library = times["{'tile': None, 'fp8': False}"]
    best = {
        fp8: min(us for name, us in times.items() if f"'fp8': {fp8}" in name and us != library) for fp8 in (False, True)
    }
    text = (
        f"128 rows, 16 heads: cuBLAS {short(library)}, ours BF16 {short(best[False])}, FP8 weights {short(best[True])}"
    )
    return f"{text} {source('h200/tune_attention')}"


def fp8_activations() -> str:
    run, shape = "h200/kernels-absorb", "T=128 H=128"
    both = []
    for op in ("mla_absorb.absorb_q", "mla_absorb.project_v"):
        times = (_us(run, op, shape, impl) for impl in ("bf16 cublas", "fp8 grouped", "fp8 batched"))
        both.append(" / ".join(times))
    text = f"128 rows, 128 heads, BF16 / masked grouped / `bmm_fp8`: {both[0]} (queries), {both[1]} (values)"
    return f"{text} {source(run)}"


def int8() -> str:
    op, shapes = "int8.int8_linear", ("T=64 24576x1536 q_b", "T=4096 24576x1536 q_b")
    times = [[_us(DENSE, op, shape, impl) for impl in ("lib.cublas", "triton.int8")] for shape in shapes]
    few, many = (" → ".join(both) for both in times)
    return f"24,576 × 1,536, `torch._int_mm` → ours: {few} (64 rows); {many} (4,096) {source(DENSE)}"


def tuned_experts() -> str:
    times = dict(row(TP8_TABLES, tokens=512)["op"])
    text = f"TP8, 512 rows: DeepGEMM {short(times['packed'])}, before {short(times['grouped, in use'])}"
    return f"{text}, tuned {short(min(times.values()))} {source(TP8_TABLES)}"


def grouped_products() -> str:
    op, shape = "moe_experts.moe_experts_fp8", "T=128 EP8 step"
    implementations = ("lib.deep_gemm_grouped", "padded", "indexed", "triton.moe_grouped")
    packed, masked, indexed, ours = (_us(MOE, op, shape, impl) for impl in implementations)
    text = f"EP8, 128 rows, DeepGEMM packed {packed}, masked {masked}, by index {indexed}; ours {ours}"
    return f"{text} {source(MOE)}"


def deepep() -> str:
    us = {way: short(row("h200/exchange", way=way, rows=128)["us"]) for way in ("deepep_ll", "gather", "both")}
    text = f"two H200s, 128 rows there and back: DeepEP {us['deepep_ll']}, NCCL {us['gather']}, ours {us['both']}"
    return f"{text} {source('h200/exchange')}"


def balanced() -> str:
    found = row("h200/balance", kind="prefill", skew="power law, sorted")
    text = f"two H200s, 16 layers, skewed prompts: {found['before_ms']:.0f} → {found['after_ms']:.0f} ms"
    return f"{text} {source('h200/balance')}"


def two_parts() -> str:
    def ms(kind: str, count: int, overlap: str) -> str:
        return f"{row('h200/ranks-overlap', kind=kind, count=count, overlap=overlap)['ms']:.1f}"

    decode, prompts = (
        " → ".join(ms(*size, overlap) for overlap in ("off", "on")) for size in (("decode", 128), ("prefill", 4))
    )
    text = f"two H200s, 8 layers, one part → two: decode 128 × 4,096 {decode} ms, prompts 4 × 4,096 {prompts}"
    return f"{text} {source('h200/ranks-overlap')}"


def forms() -> str:
    def ms(queries: int, form: str) -> str:
        found = row("h200/forms", heads=128, prefix=8192, queries=queries, form=form)
        return f"{found['ms']:.2f}"

    few, many = (f"{ms(queries, 'absorbed')} / {ms(queries, 'expanded')}" for queries in (16, 2048))
    text = f"a layer, 128 heads, 8,192 cached, absorbed / expanded: {few} ms (16 queries), {many} (2,048)"
    return f"{text} {source('h200/forms')}"


def decode_attention() -> str:
    shape = "H=128 B=128 L=4096 bfloat16"
    ours, library = (
        _us(ATTENTION, "mla_decode.mla_decode", shape, impl) for impl in ("triton.mla_decode", "lib.flash_mla")
    )
    return f"128 heads, 128 × 4,096: ours {ours}, FlashMLA {library} {source(ATTENTION)}"


def break_even() -> str:
    found = {one["prefix"]: one["queries"] for one in results("h200/forms")["break_even"] if one["heads"] == 128}
    text = f"128 heads: expanding wins from {found[4096]:.0f} queries (4,096 cached), {found[8192]:.0f} (8,192)"
    return f"{text} {source('h200/forms')}"


def no_copies() -> str:
    op, sizes = (
        "mla_absorb.absorb_q",
        (("T=1 H=16", "triton.mla_absorb"), ("T=128 H=128", "triton.mla_absorb:absorb_q")),
    )
    (few, many) = (
        f"{_us(ATTENTION, op, shape, 'with copies')} → {_us(ATTENTION, op, shape, impl)}" for shape, impl in sizes
    )
    return f"{few} (1 row, 16 heads), {many} (128, 128) {source(ATTENTION)}"


def one_pass() -> str:
    times = [
        [_us(ATTENTION, "mla_qkv.mla_qkv_norm", shape, impl) for impl in ("separate ops", "triton.mla_qkv")]
        for shape in ("T=1", "T=4096")
    ]
    few, many = (" → ".join(both) for both in times)
    return f"{few} (1 row), {many} (4,096) {source(ATTENTION)}"


def fp8_kv() -> str:
    runs, pairs = ("h200/shard-ep8-second", "h200/shard-ep8"), []
    for run in runs:
        ms = [row(run, kind="decode", count=128, kv_dtype=dtype)["ms"] for dtype in ("bfloat16", "float8_e4m3fn")]
        pairs.append(" → ".join(f"{value:.1f}" for value in ms))
    return f"step of an EP8 rank by itself, 128 × 4,096: {' and '.join(pairs)} ms {source(*runs)}"


def dependent_launch() -> str:
    found = results("h200/dependent-launch")
    steps = [(found[f"{batch}x4096"]["median_ms"], batch) for batch in (1, 16, 64)]
    texts = [f"{ms['off']:.2f} → {ms['ours+deep_gemm']:.2f} (batch {batch})" for ms, batch in steps]
    return f"step of a TP8 rank, ms: {', '.join(texts)} {source('h200/dependent-launch')}"


def graphs() -> str:
    eager, graph = (row("h200/engine-tp8", kind="decode", variant=one)["step_ms"] for one in ("eager", "graph"))
    decode = f"step of a TP8 rank: {eager:.1f} → {graph:.2f} ms {source('h200/engine-tp8')}"
    return f"{decode}; prompts on an H100, {onoff('X1', 'h100/onoff')}"


def torch_compile() -> str:
    run = "h200/engine-compile"
    graph, both = (row(run, kind="decode", variant=one)["step_ms"] for one in ("graph", "compile"))
    start = [row(run, kind="start", variant=one)["capture_s"] for one in ("graph", "compile")]
    return f"8 layers: {graph:.3f} → {both:.3f} ms, capture {start[0]:.1f} → {start[1]:.1f} s {source(run)}"


def collector() -> str:
    found = row("h200/engine-tp8", kind="collector", variant="graph")
    text = f"a full collection: {found['thawed_ms']:.0f} → {found['frozen_ms']:.1f} ms"
    return f"{text} {source('h200/engine-tp8')}"


def data_parallel() -> str:
    ms = {
        exchange: row("h200/ranks", kind="decode", count=128, exchange=exchange)["ms"]
        for exchange in ("none", "gather", "peer")
    }
    text = (
        f"two H200s, step of 128 × 4,096: no exchange {ms['none']:.1f}, NCCL {ms['gather']:.1f}, peer {ms['peer']:.1f}"
    )
    return f"{text} ms {source('h200/ranks')}"


def fused_sums() -> str:
    def both(rows: int, form: str, way: str) -> str:
        return " → ".join(short(row("h200/allreduce", rows=rows, form=form, way=one)["us"]) for one in ("nccl", way))

    text = f"two H200s: {both(1, 'plain', 'one_shot')} (1 row), {both(512, 'both', 'two_shot')} (512)"
    return f"{text} {source('h200/allreduce')}"


def uneven_ranks() -> str:
    gather, peer = (short(row("h200/exchange", way=way, rows=128)["us"]) for way in ("gather", "both"))
    return f"two H200s, 128 rows of each: padded gather {gather} → {peer} {source('h200/exchange')}"


def tensor_parallel() -> str:
    run = "h200/engine-tp8-ranks-first"
    nccl, fused = (row(run, kind="decode", sums=sums)["step_ms"] for sums in ("nccl", "fused"))
    return f"step of TP8 shapes over two H200s: NCCL {nccl:.2f}, fused sums {fused:.2f} ms {source(run)}"


def drafts() -> str:
    run, served = "h200/drafts-tp8", "h200/drafts-serving"
    gains = [row(run, kind="ratio", drafts=number)["speedup"] for number in (1, 2, 3)]
    none, three = (row(served, drafts=number)["tpot_ms"] for number in (0, 3))
    text = f"TP8 rank, 1 to 3 drafts: {', '.join(f'{gain:.2f}' for gain in gains)} × the tokens/s; served, 3 drafts:"
    return f"{text} TPOT {none:.1f} → {three:.1f} ms {source(run, served)}"


FIGURES: dict[str, Callable[[], str]] = {
    **{seed: functools.partial(onoff, seed) for seed in ALONE},
    "G1": products,
    "G2": compiled_ahead,
    "G3": tuned_products,
    "G4": quantisation,
    "G5": accuracy,
    "G6": absorbed_products,
    "G9": int8,
    "G13": fp8_activations,
    "M4": tuned_experts,
    "M6": grouped_products,
    "M7": deepep,
    "M10": balanced,
    "A1": forms,
    "A2": decode_attention,
    "A3": break_even,
    "A5": no_copies,
    "A7": one_pass,
    "A10": fp8_kv,
    "A12": dependent_launch,
    "X1": graphs,
    "X2": torch_compile,
    "X5": collector,
    "X6": two_parts,
    "P1": data_parallel,
    "P4": fused_sums,
    "P5": uneven_ranks,
    "P6": tensor_parallel,
    "S1": drafts,
    "T3": switched,
}
BLOCKS: Blocks = {"seeds": seeds}
