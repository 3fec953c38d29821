"""What the tables of `millrace bench gpu` and `node` say of each bench: one line from the results of its JSON."""

from __future__ import annotations

import statistics
from typing import Any

Results = dict[str, Any]


def logits(found: Results) -> str:
    return ", ".join(f"{row['weights']} {row['path']} {row['median']:.4f}" for row in found["rows"])


def evaluation(found: Results) -> str:
    whole = [(row["system"], row["all"]) for row in found["rows"]]
    return ", ".join(f"{name} {one['accuracy']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for name, one in whole)


def engine(found: Results) -> str:
    texts = []
    for row in found["rows"]:
        variant = row.get("variant", "")
        if row["kind"] == "decode":
            idle = row.get("idle", float("nan"))
            texts.append(f"{variant} {row['step_ms']:.2f} ms, idle {idle:.1%}{_exact(row)}")
        elif row["kind"] == "ratio":
            texts.append(f"{variant} x{row['speedup']:.2f}")
        elif row["kind"] == "capture":
            texts.append(f"{variant} captured in {row['gc_off_s']} s, with the collector on {row['gc_on_s']} s")
        elif row["kind"] == "collector":
            texts.append(f"a collection {row['frozen_ms']:.1f} ms, thawed {row['thawed_ms']:.0f} ms")
    return "; ".join(texts)


def _exact(row: Any) -> str:
    return {True: ", equal to eager", False: ", NOT EQUAL to eager"}.get(row.get("exact"), "")


def drafts(found: Results) -> str:
    """Of engines with drafts: each step, and what it makes of one without drafts."""
    speedups = {(row["batch"], row["drafts"]): row["speedup"] for row in found["rows"] if row["kind"] == "ratio"}
    texts = []
    for row in found["rows"]:
        if row["kind"] == "decode":
            speedup = speedups.get((row["batch"], row["drafts"]), 1)
            step = f"{row['drafts']} drafts {row['step_ms']:.2f} ms for {row['accept']:.2f} tokens"
            texts.append(f"{step}, x{speedup:.2f}{_exact(row)}")
    return "; ".join(texts)


def drafts_sweep(found: Results) -> str:
    """The best number of drafts by batch."""
    *best, limits = (row for row in found["rows"] if row["kind"] in ("best", "draft_batches"))
    texts = [f"{row['batch']}: {row['drafts']} drafts x{row['speedup']:.2f}" for row in best]
    return f"{', '.join(texts)}; draft_batches {limits['most']}"


def drafts_serving(found: Results) -> str:
    texts = []
    for row in found["rows"]:
        figures = f"TPOT {row['tpot_ms']:.1f} ms x{row['speedup']:.2f}" if "speedup" in row else row["error"]
        texts.append(f"{row['drafts']} drafts {figures}")
    return ", ".join(texts)


def shard(found: Results) -> str:
    texts = []
    for row in found["rows"]:
        fp8 = " FP8 KV" if row["kv_dtype"] == "float8_e4m3fn" else ""
        texts.append(f"{row['kind']} {row['count']}x{row['length']}{fp8} {row['ms']:.2f} ms")
    return ", ".join(texts)


def replicas(found: Results) -> str:
    """Each row with what differs between engines of the bench: exchange, drafts, gates and spare experts."""
    texts = []
    for row in found["rows"]:
        drafts = f", {row['drafts']} drafts, ITL {row['ms'] / row['accept']:.1f} ms" if row["drafts"] else ""
        gates = "" if row["skew"] == "even" else f", {row['skew']}, {row['spare']} spare{_ratios(row)}"
        what = f"{row['exchange']} {row['kind']} {row['count']}x{row['length']}{drafts}{gates}"
        texts.append(f"{what}: {row['ms']:.1f} ms, {row['tokens_per_s']:,} tokens/s")
    return "; ".join(texts)


def _ratios(row: Any) -> str:
    return " (busiest rank x{:.2f}, then x{:.2f})".format(*row["imbalance"]) if "imbalance" in row else ""


def ranks(found: Results) -> str:
    texts = []
    for row in found["rows"]:
        share = f", {row['communication']:.0%} communication" if row.get("communication") else ""
        texts.append(f"{row['exchange']} {row['kind']} {row['count']}x{row['length']} {row['ms']:.2f} ms{share}")
    return "; ".join(texts)


def sums(found: Results) -> str:
    """Of a tensor-parallel group: the sums by our kernel and by NCCL, with and without drafts."""
    rows = [row for row in found["rows"] if row["kind"] == "decode"]
    return ", ".join(
        f"{row['sums']} {row['drafts']} drafts {row['step_ms']:.2f} ms, {row['tokens_per_s']:.0f} tokens/s"
        for row in rows
    )


def first_token(found: Results) -> str:
    """Median of the batches of one request."""
    seconds = [row["ttft"] for row in found["batches"]]
    return (
        f"TTFT p50 {statistics.median(seconds) * 1e3:.0f} ms, {sum(row['errors'] for row in found['batches'])} failed"
    )


def serving(found: Results) -> str:
    rates = f"{found['input_token_throughput']:,.0f} prompt and {found['output_token_throughput']:,.0f} output tokens/s"
    return f"{rates}, {found['completed']} answers, {sum(found['errors'].values())} failed"


def startup(found: Results) -> str:
    return ", ".join(f"{row['caches']} {row['ready_s']:.0f} s" for row in found["rows"])


def handover(found: Results) -> str:
    times = f"transfer {found['transfer_ms']['p50']:.2f} ms, hand-over {found['handover_ms']['p50']:.2f} ms"
    return f"{times}, {found['equal_to_unified']} of {found['prompts']} equal to unified"


def kernels(found: Results) -> str:
    failed = sum("error" in row for row in found["rows"])
    return f"{len(found['rows'])} rows" + (f", {failed} with an error" if failed else "")


def absorb(found: Results) -> str:
    """The query's absorption of a rank with all heads: what runs, and both products with FP8 activations."""
    texts = []
    for shape in dict.fromkeys(row["shape"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["op"] == "mla_absorb.absorb_q" and row["shape"] == shape]
        us = {row["impl"]: row["us"] for row in rows if "error" not in row}
        shown = [f"{name} {us[name]:.1f}" for name in ("in use", "fp8 grouped", "fp8 batched") if name in us]
        if shape.endswith("H=128"):
            texts.append(f"{shape.partition(' ')[0]} {', '.join(shown)} us")
    return "; ".join([kernels(found), *texts])


def moe(found: Results) -> str:
    """The fastest of all against our kernel with an untuned configuration."""
    times = {row["impl"]: row["us"] for row in found["rows"] if row["shape"] == "T=512 TP8" and "error" not in row}
    untuned = times.pop("grouped, untuned", None)
    if untuned is None or not times:
        return kernels(found)
    best = min(times, key=lambda impl: times[impl])
    return f"{kernels(found)}; T=512 TP8: {best} {times[best]:.0f} us, untuned {untuned:.0f} us"


def onoff(found: Results) -> str:
    """The least and the largest gain of each optimisation."""
    texts = [f"{row['seed']} {row['failed']}" for row in found["rows"] if "failed" in row]
    gains: dict[str, list[float]] = {}
    for row in found["rows"]:
        if "failed" not in row:
            gains.setdefault(row["seed"], []).append(row["gain"])
    return ", ".join([*(f"{seed} x{min(all):.2f} to x{max(all):.2f}" for seed, all in gains.items()), *texts])


def rows(found: Results) -> str:
    return f"{len(found['rows'])} rows"
