"""Tables of measurements in docs/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace_bench import scaling
from millrace_bench.figures_source import Blocks, results, row, short, source, table

SUMS = (1, 32, 128, 256, 512, 1024, 4096)  # rows of kernels.md
COLUMNS = "k = 0 | k = 1 | k = 2 | k = 3"  # drafts
PLAIN_ROWS = 16  # above them a sum comes out as BF16 and as FP8


def drafts() -> str:
    sweeps = {"TP8": "h200/drafts-sweep-tp8", "EP8": "h200/drafts-sweep-ep8"}
    sizes = [
        ("TP8, batch 1, context 1K", "h200/drafts-tp8", 1),
        ("TP8, batch 16, context 1K", sweeps["TP8"], 16),
        *((f"TP8, batch {batch}", sweeps["TP8"], batch) for batch in (64, 128)),
        ("EP8, batch 1, context 1K", sweeps["EP8"], 1),
        *((f"EP8, batch {batch}", sweeps["EP8"], batch) for batch in (8, 32, 128, 256)),
        ("EP8, batch 128, context 4,032 to 4,096", "h200/drafts-ep8", 128),
    ]
    rows = [(name, *_drafts(run, batch), source(run)) for name, run, batch in sizes]
    return table(f"rank of the 671B model by itself (nothing is sent), 61 layers | {COLUMNS} | JSON", rows)


def _drafts(run: str, batch: int) -> Iterator[str]:
    """A cell for each number of drafts, empty where it was not measured."""
    steps = {one["drafts"]: one for one in results(run)["rows"] if one["kind"] == "decode" and one["batch"] == batch}
    gains = {one["drafts"]: one for one in results(run)["rows"] if one["kind"] == "ratio" and one["batch"] == batch}
    for number in range(4):
        gain = f" (× {gains[number]['speedup']:.2f})" if number in gains else ""
        yield f"{steps[number]['step_ms']:.2f} ms{gain}" if number in steps else ""


def drafts_serving() -> str:
    none, three = (row("h200/drafts-serving", drafts=number) for number in (0, 3))
    accepted = f"k = 3, each draft accepted with probability 0.85 ({three['accept']:.2f} tokens per step)"
    return table(
        "32-expert model at full depth, router → prefill (GPU 0) → decode (GPU 1), one client, 4,096 / 256 tokens"
        " | TPOT | TTFT",
        [
            ("without drafts", f"{none['tpot_ms']:.2f} ms", f"{none['ttft_ms']:.0f} ms"),
            (accepted, f"{three['tpot_ms']:.2f} ms (× {three['speedup']:.2f})", f"{three['ttft_ms']:.0f} ms"),
        ],
    )


def sums() -> str:
    def line(rows: int) -> Iterator[str]:
        form = "plain" if rows <= PLAIN_ROWS else "both"
        found = [one for one in results("h200/allreduce")["rows"] if (one["rows"], one["form"]) == (rows, form)]
        us = {one["way"]: one["us"] for one in found}
        torch = min(us["symm_one"], us["symm_two"])
        return (short(each) for each in (us["one_shot"], us["two_shot"], us["nccl"], torch, us["norm"]))

    header = "rows | one-shot | two-shot | NCCL | torch symmetric memory, better of its two | norm"
    return table(header, [(f"{rows:,}", *line(rows)) for rows in SUMS])


def two_ranks() -> str:
    """Steps of two ranks by exchange; a second run was made with `peer` alone."""

    def ms(run: str, exchange: str, step: dict[str, Any]) -> str:
        found = [one["ms"] for one in results(run)["rows"] if {**step, "exchange": exchange}.items() <= one.items()]
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


def computed() -> str:
    found = scaling.steps(scaling.Fit.of(results("h200/exchange")["rows"]), results("h200/ranks")["rows"])
    eight, many = ([step for step in found if step.gpus == gpus] for gpus in (8, 72))

    def cells(step: scaling.Step) -> tuple[str, str]:
        ms = f"{step.ms:,.0f}" if step.ms > 1000 else f"{step.ms:.1f}"
        return f"{ms} ms, {step.exchange_ms / step.ms:.0%} exchange", f"{step.tokens_per_s:,.0f}"

    return table(
        "step of each rank | 8 GPUs, one host | tokens/s of a GPU | 72 GPUs, 9 hosts | tokens/s of a GPU",
        [(one.name.replace(" x ", " × "), *cells(one), *cells(two)) for one, two in zip(eight, many, strict=True)],
    )


def overload() -> str:
    def line(one: dict[str, Any]) -> tuple[str, ...]:
        first = not one["expects"]
        pool = f"{one['pages']:,} pages" + (" of 64" if one["pages"] == 1000 else "")
        return (
            pool if first else "",
            f"{one['capacity']:.2f}/s" if first else "",
            "a page each" if first else "what is expected",
            f"{one['preemptions']:.0f}",
            f"{one['recomputed']:.3f}",
            f"{one['longest_gap']:.1f} s",
            f"{one['goodput']:.2f}/s",
            f"{one['steady']:.2f}/s",
            f"{one['tokens_per_s']:,.0f}",
        )

    header = (
        "pool | capacity | room kept | preemptions per 1,000 | recomputed per token | longest gap p99 | goodput"
        " | steady | tokens/s"
    )
    return table(header, [line(one) for one in results("cpu/overload")["rows"]])


def evaluated() -> str:
    matrix = results("h200/eval-matrix")
    against = {one["b"]: one for one in matrix["against_reference"]}
    lines = []
    for system in ("CPU FP32", "CPU FP8", "engine BF16", "P → D BF16", "engine FP8", "P → D FP8"):
        found = row("h200/eval-matrix", system=system)
        tasks = {task: one["accuracy"] for task, one in found["tasks"].items()}
        named = [tasks.pop(task) for task in ("retrieval_2k", "copy", "sort")]
        others = set(tasks.values())
        assert len(others) == 1, tasks
        same, perplexity = against.get(system), matrix["perplexity"][system]
        equal = same and found["all"]["items"] - len(same["differences"])
        lines.append(
            (
                system.replace("P → D", "prefill → decode"),
                *(f"{accuracy:.3f}" for accuracy in (*named, *others, found["all"]["accuracy"])),
                f"{same['a']}: {equal} of {found['all']['items']}" if same else "",
                f"{perplexity['value']:.3f}" if perplexity else "",
            )
        )
    return table(" | retrieval 2k | copy | sort | each other task | all | same answers as | perplexity", lines)


BLOCKS: Blocks = {
    "drafts": drafts,
    "drafts-serving": drafts_serving,
    "sums": sums,
    "two-ranks": two_ranks,
    "computed": computed,
    "overload": overload,
    "eval-h200": evaluated,
}
