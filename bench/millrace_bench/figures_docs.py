"""Tables of measurements in docs/."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from millrace_bench.figures_source import Blocks, results, row, short, source, table

COLUMNS = "k = 0 | k = 1 | k = 2 | k = 3"  # drafts
PRODUCTS = ("2112x7168 q_kv_a", "24576x1536 q_b", "7168x16384 o", "7168x2048 shared down")  # of rivals
STEPPING = {(2, 1): "", (8, 1): "60", (72, 9): "200"}  # replicas and hosts -> target of the host time per step in µs


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


def stepping() -> str:
    lines = []
    for (replicas, hosts), target in STEPPING.items():
        size = {"kind": "agreement", "replicas": replicas, "hosts": hosts}
        ours, gloo = (row("cpu/stepping", over=over, **size) for over in ("shared memory", "gloo"))
        work = (ours[f"alone_{part}_us"] for part in ("member", "captain", "path"))
        cpu = (ours["member_cpu_us"], ours["captain_cpu_us"], gloo["member_cpu_us"])
        ranks = f"{replicas} on {hosts} hosts" if hosts > 1 else f"{replicas} on one host"
        lines.append((ranks, "{:.1f} + {:.1f} = {:.1f}".format(*work), target, *(f"{us:,.0f}" for us in cpu)))
    return table("replicas | host time per step, µs | target | CPU of a member | of a captain | with gloo", lines)


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


def overload_fleet() -> str:
    def line(one: dict[str, Any]) -> tuple[str, ...]:
        assert one["failed"] == one["retries"] == one["ejections"] == 0
        refused, at_once = one["refused"] / one["ended"], one["at_once"] / max(one["refused"], 1)
        shares = f"{refused:.0%}", f"{at_once:.0%}" if one["refused"] else ""
        return str(one["workers"]), f"{one['load']:g}", f"{one['goodput']:.2f}/s", f"{one['ttft_p99']:.1f} s", *shares

    header = "workers | load | goodput | TTFT p99 | refused | of these at once"
    return table(header, [line(one) for one in results("cpu/overload-fleet")["rows"]])


def evaluated(*runs: str) -> str:
    """Rows of `millrace eval matrix`, each beside its reference; what several runs have is that of the first."""
    lines: dict[str, tuple[str, ...]] = {}
    for run in runs:
        against = {one["b"]: one for one in results(run)["against_reference"]}
        for one in results(run)["rows"]:
            system, items, compared = one["system"], one["all"]["items"], against.get(one["system"])
            lost = (f"{task} {of['accuracy']:.3f}" for task, of in one["tasks"].items() if of["accuracy"] < 1)
            same = f"{compared['a']}: {items - len(compared['differences'])} of {items}" if compared else ""
            perplexity = f"{one['perplexity']['value']:.3f}" if one["perplexity"] else ""
            right, name = f"{one['all']['correct']} of {items}", system.replace("P → D", "prefill → decode")
            lines.setdefault(system, (name, right, ", ".join(lost).replace("_", " "), same, perplexity))
    return table(" | right | lost | same answers as | perplexity", list(lines.values()))


def beside_smg() -> str:
    """Medians of the rounds."""
    found = results("cpu/peers-router")
    sides = [found[name] for name in ("smg", "millrace http", "millrace grpc", "grpc alone")]

    def cell(rounds: list[dict[str, Any]]) -> str:
        us, added = (statistics.median(one[key] for one in rounds) for key in ("us_per_token", "added_ttft_p50_ms"))
        way = statistics.median(one["token_ms"]["p50"] for one in rounds)
        return f"{us:.1f} µs; {added:.1f} ms; {way:.1f} ms"

    lines = [(load, *(cell(side["loads"][load]) for side in sides)) for load in ("quarter", "half", "full")]
    memory = (f"{side['memory']['idle_mb']:.0f}, {side['memory']['mb']:.0f} MB" for side in sides)
    lines.append(("memory idle, with 2,000 streams", *memory))
    return table("load | smg | OpenAI HTTP | gRPC | gRPC's library alone", lines)


def balance() -> str:
    """One spare slot, where loads are uneven enough to gain."""
    cases = [("power law 0.25", 8, 33), ("power law 0.5", 8, 33), ("power law 1.0", 8, 33), ("power law 0.25", 72, 5)]
    cases += [("power law 0.5", 72, 5), ("trained, 8 experts", 2, 5), ("trained, 8 experts", 4, 3)]
    columns = ("window_before", "window_after", "step_before", "step_after")
    lines = []
    for routing, ranks, slots in cases:
        found = row("cpu/balance", routing=routing, ranks=ranks, slots=slots)
        loads = routing.replace("trained", "trained checkpoint").replace("power law ", "k^-")
        ratios = (f"{found[column]:.2f}" for column in columns)
        lines.append((loads, str(ranks), str(slots), *ratios, f"{found['moved']:.0%}".replace("%", " %")))
    return table(
        "loads | ranks | slots | imbalance before | after | of single steps before | after | slots that changed", lines
    )


def sparse() -> str:
    runs = {"TP8": ("h200/shard-sparse-first", "h200/shard-sparse"), "EP8": ("h200/shard-sparse-ep8",)}
    lines = []
    for (shard, names), count in itertools.product(runs.items(), (1, 8)):
        dense, now = (row(names[-1], count=count, attention=kind) for kind in ("dense", "sparse"))
        kinds = (f"{now['kinds_ms'][kind]:.1f}" for kind in ("indexer", "attention"))
        times = (f"{one['ms']:.1f} ms" for one in (dense, now))
        first = f"{row(names[0], count=count, attention='sparse')['ms']:.1f} ms" if len(names) > 1 else ""
        lines.append((f"{shard}, {count} × 65,536", *times, *kinds, f"{dense['kinds_ms']['attention']:.1f}", first))
    header = "rank by itself | dense | sparse | of it indexer | and attention | attention, dense | sparse, first run"
    return table(header, lines)


def rivals() -> str:
    found: dict[str, dict[str, float]] = {}
    for one in results("h200/kernels-rivals")["rows"]:
        found.setdefault(one["shape"], {})[one["impl"]] = one["us"]
    shapes = [f"H={heads} B={count} L=4096 bfloat16" for heads in (16, 128) for count in (1, 32, 128)]
    shapes += [f"T={num} {product}" for num in (32, 128, 256) for product in PRODUCTS]
    lines = []
    for shape in shapes:
        us, attention = found[shape], shape.startswith("H")
        ours = us["triton.mla_decode" if attention else "triton.fp8_linear:fp8_linear"]
        library = us["lib.flash_mla" if attention else "lib.deep_gemm"]
        theirs = us["flashinfer" if attention else "lib.flashinfer_gemm"]
        cutlass = "" if attention else short(us["flashinfer cutlass"])
        lines.append((shape.removesuffix(" bfloat16"), short(ours), short(library), short(theirs), cutlass))
    return table("µs | ours | FlashMLA, DeepGEMM | FlashInfer: FA3, DeepGEMM's fork | CUTLASS in FlashInfer", lines)


def policy_cost() -> str:
    found = results("cpu/policy")
    by = {(one["policy"], one["local_prefill_tokens"]): one["us"] for one in found["decisions"]}
    middle = [by[case]["p50"] for case in (("round_robin", 0), ("kv_aware", 0), ("kv_aware", 1024))]
    tails = [one["p99"] for one in by.values()]
    usual, aware, local = (f"{us:.0f} µs" for us in middle)
    text = f"A decision takes p50 {usual} (`round_robin`) to {aware} (`kv_aware`), {local} with local prefill, p99"
    hashing = f"hashing the prompt takes {found['hash_us']['mean']:.0f} µs more"
    kv, prefix = (f"{one['bytes_per_block'] * one['blocks'] / 1e6:.0f} MB" for one in found["memory"])
    memory = f"A million blocks take {kv} in the KV index and {prefix} in the prefix index"
    return f"{text} {min(tails):.0f} to {max(tails):.0f} µs; {hashing}. {memory}.\n"


def router_cost() -> str:
    runs = [results(name)["routers"]["1"] for name in ("cpu/router", "cpu/router-http")]
    pair = results("cpu/router")["routers"]["2"]["tokens_per_s"] / runs[0]["tokens_per_s"]

    def cells(text: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return tuple(map(text, runs))

    def way(one: dict[str, Any]) -> str:
        return f"{one['token_latency_ms']['p50']:.1f} / {one['token_latency_ms']['p99']:.1f} ms"

    def requests(one: dict[str, Any]) -> str:
        return f"{one['requests_per_s']:.0f}; {one['router_us_per_request'] / 1e3:.1f} ms"

    return table(
        "one router process | gRPC | OpenAI HTTP | target",
        [
            ("tokens per second and core", *cells(lambda one: f"{one['tokens_per_s_per_core']:,.0f}"), "25,000"),
            (
                "added to the first token at half load, p50",
                *cells(lambda one: f"{one['added_ttft_p50_ms']:.1f} ms"),
                "1.5 ms",
            ),
            ("a token from worker to client at half load, p50 / p99", *cells(way), ""),
            ("requests of one token per second; CPU of each", *cells(requests), ""),
            ("two processes: tokens per second, as a multiple of those of one", f"{pair:.2f}", "", "1.7"),
        ],
    )


def transfer_cpu() -> str:
    def line(one: dict[str, Any]) -> tuple[str, ...]:
        size = f"{one['page_bytes'] / 1e6:.1f} MB" if one["page_bytes"] > 1 << 20 else f"{one['page_bytes']:,} bytes"
        speeds = (f"{one[name]:.1f}" for name in ("gb_per_s", "memcpy_gb_per_s"))
        return f"{one['pages']} × {size}", f"{one['read_us'] / 1e3:.3g} ms", *speeds

    run = results("cpu/transfer")
    first, connecting, agent = (run[f"{name}_ms"] for name in ("first_read", "connect", "backend"))
    thread = run["reader_overhead_ms"] - run["overhead_ms"]
    text = f"The first read of a pair takes {first:.0f} ms, connecting {connecting:.0f} ms, the agent with its pool"
    text += f" {agent / 1e3:.2f} s; an idle reader thread adds {thread * 1e3:.0f} µs to a read.\n"
    return table("pages | time | GB/s | memcpy of the same run", map(line, run["rows"])) + "\n" + text


def tiers() -> str:
    run = "h200/tiers"
    adjacent, scattered = (
        [row(run, "copies", pages=64, order=order, way=way)["gb_per_s"] for way in ("store", "load")]
        for order in ("adjacent", "scattered")
    )
    alone = row(run, "copies", pages=1, order="adjacent", way="store")["gb_per_s"]
    copies = f"{adjacent[0]:.1f} and {adjacent[1]:.1f} GB/s; scattered pages {scattered[0]:.1f} and {scattered[1]:.1f}"
    lines = [("copies of 64 pages to the host, and back", f"{copies}; one page alone {alone:.0f}")]
    for one in results(run)["steps"]:
        if (beside := one["copies"]) == "always":
            beside = f"copies both ways all the time, {one['gb_per_s']:.0f} GB/s together"
        batch, context = map(int, one["step"].split("x"))
        what = f"decode step {batch} × {context:,} of an EP8 rank, {one['ms']:.1f} ms alone, beside {beside}"
        lines.append((what, f"{one['slower'] * 100:+.1f} %"))
    return table("what | measured", lines)


def tiers_passes() -> str:
    lines = []
    for one in results("h200/tiers")["passes"]:
        engine = "models/tiny" if one["engine"] == "tiny" else one["engine"]
        times = (f"{one[f'ttft_{part}_ms']:.0f} ms" for part in ("p50", "p99"))
        tier = "host" if one["host_pages"] else "none"
        lines.append((engine, tier, f"{one['device_hits'] + one['host_hits']:.2f}", *times))
    return table("engine | tier | hits | TTFT p50 | p99", lines)


BLOCKS: Blocks = {
    "eval-cpu": lambda: evaluated("cpu/eval-matrix", "cpu/eval-matrix-switches"),
    "policy-cost": policy_cost,
    "router-cost": router_cost,
    "transfer-cpu": transfer_cpu,
    "tiers": tiers,
    "tiers-passes": tiers_passes,
    "balance": balance,
    "sparse": sparse,
    "rivals": rivals,
    "drafts": drafts,
    "drafts-serving": drafts_serving,
    "stepping": stepping,
    "beside-smg": beside_smg,
    "overload": overload,
    "overload-fleet": overload_fleet,
    "eval-h200": lambda: evaluated("h200/eval-matrix"),
    "eval-h100": lambda: evaluated("h100/eval-matrix"),
    "eval-ranks": lambda: evaluated("h100/eval-matrix-ranks", "h100/eval-matrix-ranks-first"),
}
