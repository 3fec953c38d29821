"""Tables of docs/ about several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from millrace_bench import gpu_figures, scaling
from millrace_bench.figures_source import Blocks, results, row, rows, short, source, table

SUMS = (1, 32, 128, 256, 512, 1024, 4096)  # rows of kernels.md
PLAIN_ROWS = 16  # above them a sum comes out as BF16 and as FP8
SIZES = {
    ("decode", 256): "decode 256 × 2,048",
    ("decode", 128): "decode 128 × 4,096",
    ("prefill", 4): "prefill 4 × 4,096",
}
HOST_RUNS = ("node-decode", "node-deepep", "node-drafts", "node-skew")  # of two H100s
SYSTEMS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {  # stages of `bench node` on two H100s, by their run
    "node-alone": ("`alone`", gpu_figures.ranks),
    "node-ttft-1600": ("`ttft-1600`", gpu_figures.first_token),
    "node-ttft-1600-first": ("`ttft-1600`, before steps with prompts were graphs", gpu_figures.first_token),
    "node-ttft-8192": ("`ttft-8192`, likewise", gpu_figures.first_token),
    "node-handover": ("`handover`, 14 layers", gpu_figures.handover),
    "node-seeds-512-1": ("`seeds-512-1`", gpu_figures.serving),
    "node-seeds-1-512": ("`seeds-1-512`", gpu_figures.serving),
    "node-startup": ("`startup`", gpu_figures.startup),
}
TOPOLOGIES = ("pair", "unified", "conditional")  # of `bench pd`
APART = ("h100/pd-pair", "h100/pd-unified", "h100/pd-conditional", "h100/pd-conditional-wait")


def sums() -> str:
    def line(num: int) -> Iterator[str]:
        form = "plain" if num <= PLAIN_ROWS else "both"
        us = {one["way"]: one["us"] for one in rows("h200/allreduce", rows=num, form=form)}
        torch = min(us["symm_one"], us["symm_two"])
        return (short(each) for each in (us["one_shot"], us["two_shot"], us["nccl"], torch, us["norm"]))

    header = "rows | one-shot | two-shot | NCCL | torch symmetric memory, better of its two | norm"
    return table(header, [(f"{num:,}", *line(num)) for num in SUMS])


def tp_step() -> str:
    ours, nccl, none = (
        row(f"h200/{run}", kind="decode", **which)["step_ms"]
        for run, which in (
            ("engine-tp8-ranks", {"sums": "fused"}),
            ("engine-tp8-ranks-first", {"sums": "nccl"}),
            ("drafts-tp8", {"drafts": 0}),
        )
    )
    alone = rows("h200/allreduce", rows=1, form="plain", way="one_shot")[0]["us"]
    return (
        "A TP8 rank's shapes over two ranks, one sequence, context 1K:"
        f" {ours:.2f} ms a step (target 4.3; sums by NCCL {nccl:.2f}, without sums {none:.2f})."
        f" One row is summed in {short(alone)} µs.\n"
    )


def two_ranks() -> str:
    """Steps of two ranks by exchange; a second run was made with `peer` alone."""

    def ms(run: str, exchange: str, step: dict[str, Any]) -> str:
        found = [one["ms"] for one in rows(run, exchange=exchange, **step)]
        return "".join(f"{value:,.0f}" if value > 1000 else f"{value:.1f}" for value in found)

    def line(kind: str, count: int, length: int, target: str) -> tuple[str, ...]:
        step = {"kind": kind, "count": count, "length": length}
        again = ms("h200/ranks-second", "peer", step)
        peer = ms("h200/ranks", "peer", step) + (f", second run {again}" if again else "")
        none, gather = (ms("h200/ranks", exchange, step) for exchange in ("none", "gather"))
        return f"{kind} {count} × {length:,}", f"{none} ms", peer, gather, target

    return table(
        "step of each rank | `none` | `peer` | `gather` (NCCL) | target",
        [
            line("decode", 128, 4096, "50"),
            line("decode", 256, 2048, "57"),
            line("prefill", 4, 4096, "1,450"),
        ],
    )


def _computed(gpus: int) -> list[scaling.Step]:
    found = scaling.steps(scaling.Fit.of(results("h200/exchange")["rows"]), results("h200/ranks")["rows"])
    return [step for step in found if step.gpus == gpus]


def computed() -> str:

    def cells(step: scaling.Step) -> tuple[str, str]:
        ms = f"{step.ms:,.0f}" if step.ms > 1000 else f"{step.ms:.1f}"
        return f"{ms} ms, {step.exchange_ms / step.ms:.0%} exchange", f"{step.tokens_per_s:,.0f}"

    return table(
        "step of each rank | 8 GPUs, one host | tokens/s of a GPU | 72 GPUs, 9 hosts | tokens/s of a GPU",
        [
            (one.name.replace(" x ", " × "), *cells(one), *cells(two))
            for one, two in zip(_computed(8), _computed(72), strict=True)
        ],
    )


def node() -> str:
    """What the same model predicts of `millrace bench node` on eight GPUs."""
    steps = {step.name: step for step in _computed(8)}
    decode, prefill = steps["decode 256 x 2,048"], steps["prefill 4 x 4,096"]
    drafted = row("h200/drafts-ep8", kind="decode", drafts=1)["step_ms"] + decode.exchange_ms  # 256 rows as well
    alone, three = (row("h200/drafts-sweep-tp8", kind="decode", batch=1, drafts=number) for number in (0, 3))
    single = row("h200/engine-tp8-ranks", kind="decode")["step_ms"]
    tp = single * three["step_ms"] / alone["step_ms"]
    return table(
        "`bench node` on eight GPUs | predicted | target",
        [
            (
                "decode 256 × 2,048 of each GPU, no drafts",
                f"{decode.ms:.1f} ms, {8 * decode.tokens_per_s:,.0f} tokens/s",
                "51 ms, 40,000 tokens/s",
            ),
            (
                "decode 128 × 4,096, one draft accepted with probability 0.85",
                f"{8 * 128 * 1.85 / drafted * 1e3:,.0f} tokens/s, ITL {drafted / 1.85:.1f} ms",
                "24,000 tokens/s, ITL under 50 ms",
            ),
            ("prefill 4 × 4,096 of each GPU", f"{8 * prefill.tokens_per_s:,.0f} tokens/s", "90,000 tokens/s"),
            ("TP8, one sequence, context 1K, no drafts", f"{single:.1f} ms", "4.6 ms"),
            ("the same with 3 drafts, 2.6 tokens of a step", f"{2.6 / tp * 1e3:.0f} tokens/s", "380 tokens/s"),
        ],
    )


def host() -> str:
    """Steps of `millrace bench node` on two H100s, by what they exchange, draft and prefer."""
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for run in HOST_RUNS:
        for one in rows(f"h100/{run}"):
            found.setdefault((run, _way(one)), {})[one["kind"], one["count"]] = _step(one)
    lines = [
        (way, *(steps.get(size, "") for size in SIZES), source(f"h100/{run}")) for (run, way), steps in found.items()
    ]
    return table(" | ".join((" ", *SIZES.values(), "JSON")), lines)


def systems() -> str:
    lines = [(stage, text(results(f"h100/{run}")), source(f"h100/{run}")) for run, (stage, text) in SYSTEMS.items()]
    return table("stage | measured | JSON", lines)


def _way(one: dict[str, Any]) -> str:
    drafts = f", {one['drafts']} draft" if one["drafts"] else ""
    skew = f", skew: {one['skew']}, {one['spare'] or 'no'} spare expert" if one["skew"] != "even" else ""
    return f"`{one['exchange']}`{drafts}{skew}"


def _step(one: dict[str, Any]) -> str:
    tokens = f", {one['accept']:.2f} tokens" if one["drafts"] else ""
    return f"{short(one['ms'])} ms{tokens}"


def apart(*runs: str, shown: Collection[float] = ()) -> str:
    """`millrace bench pd`: a cell for each load, rate (all, or these) and topology."""
    found: dict[tuple[str, float], dict[str, str]] = {}
    for run in runs:
        for one in rows(run):
            if not shown or one["rate"] in shown:
                found.setdefault((one["load"], one["rate"]), {})[one["topology"]] = _within(one)
    lines = [
        (load, f"{rate:g}", *(cells.get(topology, "") for topology in TOPOLOGIES))
        for (load, rate), cells in found.items()
    ]
    return table(" | ".join(("tokens", "requests/s", *(f"`{topology}`" for topology in TOPOLOGIES))), lines)


def launches() -> str:
    """The same requests with the next step launched at once, and shortly before it begins."""
    lines = []
    for topology in ("pair", "unified"):
        pairs = zip(rows(f"h100/pd-launch-{topology}-before"), rows(f"h100/pd-launch-{topology}"), strict=True)
        for before, after in pairs:
            cells = (
                f"{short(1e3 * before[name][of])} → {short(1e3 * after[name][of])}"
                for name, of in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "mean"), ("icl", "p99"))
            )
            lines.append((f"`{topology}`", f"{after['load']}, {after['rate']:g}/s", *cells))
    return table("system | load | TTFT p50, ms | TTFT p99 | TPOT, mean | gap, p99", lines)


def _within(one: dict[str, Any]) -> str:
    ttft, tpot, gap = (1e3 * one[name]["p99"] for name in ("ttft", "tpot", "icl"))
    return f"{one['slo_met']:.0%}; {ttft:,.0f}, {tpot:.0f}, {gap:.0f} ms"


BLOCKS: Blocks = {
    "sums": sums,
    "tp-step": tp_step,
    "two-ranks": two_ranks,
    "computed": computed,
    "node": node,
    "host": host,
    "systems": systems,
    "apart": lambda: apart(*APART),
    "results-apart": lambda: apart(*APART, shown=(5.0, 20.0, 32.0)),
    "launches": launches,
    "busy": lambda: apart("cpu/pd-sim-busy"),
}
