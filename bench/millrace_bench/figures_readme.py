"""The tables of results in README.md. Targets are typed here; what was measured comes from the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from millrace_bench.figures_source import RESULTS, Blocks, results, row, rows, short, source, table

DECISION_US = 300


def one_cpu() -> str:
    return table("what | measured | target | command | JSON", [*_router(), *_host(), *_served()])


def _router() -> Iterator[tuple[str, ...]]:
    grpc, http = results("cpu/router")["routers"], results("cpu/router-http")["routers"]["1"]
    one, two = grpc["1"], grpc["2"]
    yield (
        "tokens streamed through one router process, 256 streams",
        f"gRPC {one['tokens_per_s_per_core']:,.0f} per second and core, OpenAI HTTP"
        f" {http['tokens_per_s_per_core']:,.0f}",
        "25,000",
        "`millrace bench router --routers 1 2`, `--routers 1 --api http`",
        source("cpu/router", "cpu/router-http"),
    )
    yield (
        "added by the router to the first token at half load, p50",
        f"gRPC {one['added_ttft_p50_ms']:.1f} ms, HTTP {http['added_ttft_p50_ms']:.1f} ms",
        "1.5 ms",
        "the same",
        source("cpu/router", "cpu/router-http"),
    )
    yield (
        "tokens per second of two router processes, as a part of twice those of one; clients and workers share the"
        " cores",
        f"{two['tokens_per_s'] / one['tokens_per_s'] / 2:.2f}",
        "0.85",
        "the same",
        source("cpu/router"),
    )
    decisions = [policy["us"]["p99"] for policy in results("cpu/policy")["decisions"]]
    slow = sum(us > DECISION_US for us in decisions)
    yield (
        "a routing decision among 64 workers, index of 100,000 blocks, CPU time, p99, by policy",
        f"{min(decisions):.0f} to {max(decisions):.0f} µs",
        f"{DECISION_US} µs" + (f", missed by {slow} of {len(decisions)}" if slow else ""),
        "`millrace bench policy`",
        source("cpu/policy"),
    )


def _host() -> Iterator[tuple[str, ...]]:
    alone, full = (row("cpu/engine", kind="decode", batch=batch) for batch in (1, 256))
    yield (
        "host time of a decode step, batch 1 (schedule, build and commit alone)",
        f"{alone['step_us']:.0f} µs ({_own(alone):.0f})",
        "150 µs",
        "`millrace bench engine`",
        source("cpu/engine"),
    )
    yield (
        "the same, batch 256",
        f"{full['step_us'] / 1e3:.2f} ms ({_own(full) / 1e3:.2f})",
        "1.5 ms",
        "the same",
        source("cpu/engine"),
    )
    reads = [found for found in results("cpu/transfer")["rows"] if found["page_bytes"] > 1e6]
    speeds, copies = ([found[key] for found in reads] for key in ("gb_per_s", "memcpy_gb_per_s"))
    yield (
        "NIXL READ between processes, 1 to 64 pages of 4.5 MB, CPU memory",
        f"{min(speeds):.1f} to {max(speeds):.1f} GB/s (memcpy {min(copies):.1f} to {max(copies):.1f})",
        "3 GB/s",
        "`millrace bench transfer`",
        source("cpu/transfer"),
    )


def _served() -> Iterator[tuple[str, ...]]:
    load = "--num-requests 200 --concurrency 8 --input-len 500 --output-len 64 --ignore-eos"
    command = f"`millrace bench serving --self-serve {load}`"
    yield (
        "200 requests of 500 + 64 tokens, 8 clients, prefill → decode",
        _load(results("cpu/serving")),
        "",
        command,
        source("cpu/serving"),
    )
    unified = _load(results("cpu/serving-unified"))
    yield "the same, one unified worker", unified, "", "with `--unified`", source("cpu/serving-unified")
    yield (
        "the same answers as transformers, prefill → decode",
        _answers(),
        "all; FP8 within one standard error",
        "`millrace eval matrix --num-items 40`",
        source("cpu/eval-matrix"),
    )


def _own(step: dict[str, Any]) -> float:
    return float(step["schedule_us"] + step["build_us"] + step["commit_us"])


def _load(report: dict[str, Any]) -> str:
    ttft, tpot = (1e3 * report[name]["p50"] for name in ("ttft", "tpot"))
    rate = report["output_token_throughput"]
    return f"TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms (p50), {rate:.0f} output tokens/s"


def _answers() -> str:
    matrix = results("cpu/eval-matrix")
    items = row("cpu/eval-matrix", system="transformers")["all"]["items"]
    other = {one["b"]: len(one["differences"]) for one in matrix["against_reference"]}
    return f"{items - other['P → D BF16']} of {items} (FP8: {items - other['P → D FP8']})"


def one_h200() -> str:
    return table("what | measured | target | JSON", [*_steps(), *_with_drafts(), *_start_and_transfer(), *_accuracy()])


def _steps() -> Iterator[tuple[str, ...]]:
    graph, eager = (row("h200/engine-tp8", kind="decode", variant=variant) for variant in ("graph", "eager"))
    yield (
        "decode step of a TP8 rank, batch 1, context 1K, the whole engine (CUDA graph; eager"
        f" {eager['step_ms']:.1f} ms)",
        f"{graph['step_ms']:.2f} ms, GPU idle {100 * graph['idle']:.1f} %",
        "4.5 ms, 3 %",
        source("h200/engine-tp8"),
    )
    yield _ep8_decode("decode step of one EP8 rank by itself, batch 128, context 4K", 128, 4096, "42 ms, missed")
    yield _ep8_decode("the same, batch 256, context 2K", 256, 2048, "48 ms, missed")
    yield _ep8_prefill("prefill of 4 × 4,096 tokens on one EP8 rank by itself", 4, 4096, "1.25 s, missed")
    yield _ep8_prefill("the same, 16 × 1,024 tokens", 16, 1024, "1.1 s, missed")


def _with_drafts() -> Iterator[tuple[str, ...]]:
    yield (
        "drafts (MTP): EP8 rank by itself, batch 128, context 4K, one draft, 1.85 tokens per step"
        " (`millrace bench engine --drafts 0 1`)",
        _drafts("h200/drafts-ep8", 128, 1),
        "1.25 ×",
        source("h200/drafts-ep8"),
    )
    yield (
        "the same: TP8 rank, batch 1, context 1K, one, two, three drafts, 1.85, 2.35, 2.6 tokens per step",
        _drafts("h200/drafts-tp8", 1, 1, 2, 3),
        "4.7, 5.4, 6.1 ms; 1.6 ×: missed",
        source("h200/drafts-tp8"),
    )
    none, three = (row("h200/drafts-serving", drafts=drafts) for drafts in (0, 3))
    yield (
        "the same: 32-expert model, router → prefill → decode on two H200s, one client, three drafts,"
        f" {three['accept']:.2f} tokens per step",
        f"TPOT {none['tpot_ms']:.2f} → {three['tpot_ms']:.2f} ms, {three['speedup']:.2f} ×",
        "1.5 ×",
        source("h200/drafts-serving"),
    )


def _start_and_transfer() -> Iterator[tuple[str, ...]]:
    cold, warm = (row("h200/startup", caches=caches)["ready_s"] for caches in ("cold", "warm"))
    yield (
        "start of a TP8 rank to READY, empty and full caches (`millrace bench startup`)",
        f"{cold:.0f} s, {warm:.0f} s",
        "360 s, 60 s",
        source("h200/startup"),
    )
    prompt = results("h200/handover")
    yield (
        "hand-over of a 4,096-token prompt, two processes, 6 layers, p50 (`millrace bench handover`)",
        f"{prompt['transfer_ms']['p50']:.1f} ms, {prompt['equal_to_unified']} of {prompt['prompts']} answers equal to"
        " unified",
        "3 ms",
        source("h200/handover"),
    )
    yield (
        "NIXL READ from one H200 to another, 64 pages of 4.5 MB (`millrace bench transfer`)",
        f"{results('h200/transfer')['v3_gb_per_s']:.0f} GB/s",
        "",
        source("h200/transfer"),
    )


def _accuracy() -> Iterator[tuple[str, ...]]:
    bf16, fp8 = (row("h200/logits", weights=weights, path="prompt")["median"] for weights in ("BF16", "FP8"))
    yield (
        "logits against FP32 on a CPU, median error on prompts (`millrace eval logits`)",
        f"BF16 {bf16:.3f}, FP8 {fp8:.3f}",
        "0.02, 0.08",
        source("h200/logits"),
    )
    right = {one["system"]: one["all"]["correct"] for one in results("h200/eval-matrix")["rows"]}
    yield (
        "right answers of 280, engine and prefill → decode (`millrace eval matrix --device cuda`)",
        f"BF16 {right['engine BF16']} and {right['P → D BF16']}, FP8 {right['engine FP8']} and {right['P → D FP8']}"
        f" (the same arithmetic on a CPU: {right['CPU FP8']})",
        "",
        source("h200/eval-matrix"),
    )


def _ep8_decode(what: str, batch: int, context: int, target: str) -> tuple[str, ...]:
    """Both cards, in the order of the runs."""
    runs = ("h200/shard-ep8-second", "h200/shard-ep8")
    bf16, fp8 = (
        [row(run, kind="decode", count=batch, length=context, kv_dtype=dtype)["ms"] for run in runs]
        for dtype in ("bfloat16", "float8_e4m3fn")
    )
    text = f"{bf16[0]:.1f} and {bf16[1]:.1f} ms ({fp8[0]:.1f} and {fp8[1]:.1f})"
    return f"{what} (with FP8 KV), two cards", text, target, source(*runs)


def _ep8_prefill(what: str, prompts: int, length: int, target: str) -> tuple[str, ...]:
    ms = row("h200/shard-ep8", kind="prefill", count=prompts, length=length, kv_dtype="bfloat16")["ms"]
    return what, f"{ms / 1e3:.2f} s", target, source("h200/shard-ep8")


def _drafts(run: str, batch: int, *numbers: int) -> str:
    step = {n: row(run, kind="decode", batch=batch, drafts=n)["step_ms"] for n in (0, *numbers)}
    gain = ", ".join(f"{row(run, kind='ratio', batch=batch, drafts=n)['speedup']:.2f}" for n in numbers)
    digits = 1 if step[0] > 10 else 2
    after = ", ".join(f"{step[n]:.{digits}f}" for n in numbers)
    return f"{step[0]:.{digits}f} → {after} ms a step; {gain} × the tokens/s"


def two_h200() -> str:
    return table("what | measured | target | JSON", [*_sums_and_exchange(), *_two_ranks()])


def _sums_and_exchange() -> Iterator[tuple[str, ...]]:
    exchange = {way: row("h200/exchange", way=way, rows=128)["us"] for way in ("both", "deepep_ll", "gather")}
    yield (
        "rows to experts and sums back, 128 rows of each GPU (`python -m millrace_bench.exchange`)",
        f"{exchange['both']:.0f} µs (DeepEP low latency {exchange['deepep_ll']:.0f}; NCCL {exchange['gather']:.0f}, in"
        " three all-gathers and a reduce-scatter)",
        "45 µs",
        source("h200/exchange"),
    )
    sums = {way: row("h200/allreduce-second", way=way, rows=1, form="plain")["us"] for way in ("one_shot", "nccl")}
    yield (
        "sum over two GPUs, residual, RMSNorm, one row of 7,168 (`millrace bench allreduce`)",
        f"{sums['one_shot']:.1f} µs (NCCL and norm {sums['nccl']:.1f})",
        "6 µs",
        source("h200/allreduce-second"),
    )
    fused = row("h200/engine-tp8-ranks", kind="decode", sums="fused")["step_ms"]
    nccl = row("h200/engine-tp8-ranks-first", kind="decode", sums="nccl")["step_ms"]
    yield (
        "decode step of a TP8 rank's shapes, summed over two GPUs, batch 1, context 1K"
        " (`millrace bench engine --shard tp8 --ranks 2`)",
        f"{fused:.2f} ms (NCCL {nccl:.2f})",
        "4.3 ms",
        source("h200/engine-tp8-ranks", "h200/engine-tp8-ranks-first"),
    )


def _two_ranks() -> Iterator[tuple[str, ...]]:
    runs = ("h200/ranks", "h200/ranks-second", "h200/ranks-third")

    def of_runs(**step: Any) -> list[float]:
        return [one["ms"] for run in runs for one in rows(run, exchange="peer", **step)]

    small, large, prompts = of_runs(count=128), of_runs(count=256), of_runs(kind="prefill")
    yield (
        "the engine's own path with dp = 2: 61 layers, 64 experts, decode 128 × 4,096 and 256 × 2,048 of each GPU"
        " (`millrace bench ranks`)",
        f"{min(small):.1f} to {max(small):.1f}, and {min(large):.1f} to {max(large):.1f} ms",
        "50, 57 ms: missed",
        source(*runs),
    )
    seconds = f"{min(prompts) / 1e3:.2f} to {max(prompts) / 1e3:.2f} s"
    yield "the same, prefill of 4 × 4,096 of each GPU", seconds, "1.45 s: missed", source(*runs)
    shared = row("h200/shared-prompts", way="shared", prefill_tokens=16384)["ms"]
    one = row("h200/shared-prompts-one", way="one", prefill_tokens=16384)["ms"]
    yield (
        "a prompt of 32K, 12 layers, shared by two GPUs against one (`python -m millrace_bench.shared_prompts`)",
        f"{shared / one:.2f} of the time",
        "0.6",
        source("h200/shared-prompts", "h200/shared-prompts-one"),
    )


def beside_sglang() -> str:
    """Medians of the rounds, which have a JSON each; a case is not in all of them."""
    runs = [f"h200/peers-engines{suffix}" for suffix in ("", "-second", "-third")]
    head = "step of the whole engine | Millrace | SGLang 0.5.17 | SGLang / Millrace (goal 1.25) | JSON of the rounds"
    return table(head, [_beside(case, runs) for case in (one["case"] for one in results(runs[0])["rows"])])


def _beside(case: str, runs: list[str]) -> tuple[str, ...]:
    found = {run: one for run in runs for one in rows(run, case=case)}
    own, peer = (statistics.median(one[who] for one in found.values()) for who in ("ours_ms", "peer_ms"))
    kind, _, size = case.partition(" ")
    count, length = size.split("x")
    what = f"{kind}, {count} × {int(length):,} tokens"
    rounds = ", ".join(f"[{number}]({RESULTS}/{run}.json)" for number, run in enumerate(found, 1))
    return what, f"{short(own)} ms", f"{short(peer)} ms", f"{peer / own:.2f}", rounds


BLOCKS: Blocks = {
    "results-cpu": one_cpu,
    "results-h200": one_h200,
    "results-two-h200": two_h200,
    "results-sglang": beside_sglang,
}
