"""Our engine's steps beside another engine's, in the same run: one card, the same shapes, in turns.

    python -m millrace_bench.peers.engines --peer 'bash peer.sh' --peer-rows peer.jsonl --rounds 3
    python -m millrace_bench.peers.engines --tiny                    ours alone, small, on a CPU: whether it runs

The model has V3's widths with 61 layers and 32 experts in one group, FP8 weights and BF16 KV, both random, on one GPU.
A round runs ours in a process of its own, then the command `--peer`, which does the same work and leaves its rows in
`--peer-rows`, one JSON object in a line: {"name": "FlashMLA", "case": "decode 128x4096", "ms": 63.7}. Of several rows
of a case the best one counts.

    decode BxL    median step of the whole engine (schedule, model, sampling, read) with B sequences of L tokens
    prefill PxL   median step of P prompts of L tokens, the last rows' logits included; no request around it

Rows of a driver of SGLang's one-batch benchmark are read as they are, times in ms; its
cases are KIND:BATCH:LENGTH:STEPS, and a row with "error" does not count:

    prefill:4:4096:3      "prefill_ms"
    one:1:1024:64         "decode_ms", as decode 1x1024
    decode:128:4096:16    "step_ms" or "step_nosync_ms", the smaller one

The ratio of a case is the peer's median of rounds by ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from millrace_load.record import Record, Row, print_record
from millrace_serve.engine.config import Execution
from millrace_serve.model.deepseek_v3 import DeepseekV3

from millrace_bench import engine_model, shard, v3

GOAL = 1.25
CASES = (
    *("decode 1x1024", "decode 1x4096", "decode 256x2048", "decode 128x4096"),
    *("prefill 4x4096", "prefill 16x1024"),
)
# What SGLang's driver calls the times of its kinds.
TIMES = {"prefill": ("prefill_ms",), "one": ("decode_ms",), "decode": ("step_ms", "step_nosync_ms")}
OUTPUTS = 64  # tokens of each sequence, within the length of its case
Times = dict[str, list[float]]  # by case, one of each round


def ours(cases: Sequence[str], layers: int, device: torch.device, widths: dict[str, Any]) -> Iterator[Row]:
    """{"case", "ms"} of every case."""
    model = shard.build(shard.SHARDS["one"], layers, device, {**v3.WIDTHS["e32"], **widths})
    for case in cases:
        kind, size = case.split()
        count, length = _size(size, bool(widths))
        if kind == "decode":
            ms = _decode_ms(model, count, length, device)
        else:
            args = argparse.Namespace(shard="one", repeats=15, profile=False)
            ms = shard.measure(model, "prefill", count, length, "bfloat16", args)["ms"]
        yield {"case": case, "ms": ms}


def _decode_ms(model: DeepseekV3, batch: int, length: int, device: torch.device) -> float:
    work = engine_model.Work((batch,), length - OUTPUTS, OUTPUTS, context=True)
    execution = Execution(memory_fraction=0.98, graphs=(batch,))
    rows = list(engine_model.run(work, model, device, execution, prefill_tokens=16))
    gc.collect()  # the engine and its pages: those of two cases do not fit
    if device.type == "cuda":
        torch.cuda.empty_cache()
    (ms,) = (row["step_ms"] for row in rows if row["kind"] == "decode")
    return float(ms)


def _size(text: str, tiny: bool) -> tuple[int, int]:
    count, length = map(int, text.split("x"))
    return (min(count, 2), OUTPUTS + 40) if tiny else (count, length)


def peer_rows(lines: Iterable[str]) -> list[Row]:
    """{"name", "case", "ms"} of every row that counts, of either form. Raises ValueError for a case of neither."""
    rows = [row for row in map(json.loads, lines) if "error" not in row]
    return [row if "ms" in row else _converted(row) for row in rows]


def _converted(row: Row) -> Row:
    kind, *sizes = row["case"].split(":")
    if kind not in TIMES or len(sizes) != 3:
        kinds = ", ".join(TIMES)
        raise ValueError(f'case {row["case"]!r} of the peer: it needs "ms", or KIND:BATCH:LENGTH:STEPS with {kinds}')
    step = "prefill" if kind == "prefill" else "decode"
    return {"name": row["name"], "case": f"{step} {sizes[0]}x{sizes[1]}", "ms": min(row[name] for name in TIMES[kind])}


def best(rows: Iterable[Row]) -> dict[str, Row]:
    """The fastest row of each case."""
    return {row["case"]: row for row in sorted(rows, key=lambda row: -row["ms"])}


def ratios(own: Times, peer: Times) -> list[Row]:
    """One row per case, those that the peer has not measured without a ratio."""
    table = []
    for case, times in own.items():
        row: Row = {"case": case, "ours_ms": statistics.median(times), "ours": times}
        if others := peer.get(case):
            median = statistics.median(others)
            row |= {"peer_ms": median, "peer": others, "ratio": median / row["ours_ms"]}
        table.append(row)
    return table


def run(args: argparse.Namespace) -> list[Row]:
    own: Times = defaultdict(list)
    peer: Times = defaultdict(list)
    started = time.monotonic()
    for turn in range(args.rounds):
        if turn and (time.monotonic() - started) * (turn + 1) / turn > args.limit_s:
            print(f"{turn} of {args.rounds} rounds: another one ends after --limit-s {args.limit_s:g}", file=sys.stderr)
            break
        command = [sys.executable, "-m", __spec__.name, "--ours", "--layers", str(args.layers), "--cases", *args.cases]
        output = subprocess.run(command + ["--tiny"] * args.tiny, check=True, stdout=subprocess.PIPE, text=True).stdout
        _add(own, {row["case"]: row for row in map(json.loads, output.splitlines())}, turn, "ours")
        if args.peer:
            args.peer_rows.unlink(missing_ok=True)
            subprocess.run(shlex.split(args.peer), check=True, stdout=sys.stderr)
            _add(peer, best(peer_rows(args.peer_rows.read_text().splitlines())), turn, "peer")
    return ratios(own, peer)


def _add(times: Times, rows: dict[str, Row], turn: int, who: str) -> None:
    for case, row in rows.items():
        times[case].append(row["ms"])
        print(f"round {turn + 1}  {who}  {case}  {row['ms']:.2f} ms  {row.get('name', '')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", default="", metavar="COMMAND", help="command of one round of the other engine")
    parser.add_argument("--peer-rows", type=Path, default=Path("peer.jsonl"), metavar="FILE", help="rows (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds of all rounds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help="(%(choices)s)")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--tiny", action="store_true", help="small widths on a CPU")
    parser.add_argument("--ours", action="store_true", help="print one round of ours as JSON lines")
    args = parser.parse_args()
    if args.ours:
        for row in ours(
            args.cases, args.layers, torch.device("cpu" if args.tiny else "cuda"), v3.TINY if args.tiny else {}
        ):
            print(json.dumps(row), flush=True)
        return
    rows = run(args)
    for row in rows:
        peer = f"peer {row['peer_ms']:.2f} ms, ratio {row['ratio']:.2f} (goal {GOAL})" if "ratio" in row else "no peer"
        print(f"{row['case']}: ours {row['ours_ms']:.2f} ms, {peer}")
    print_record(Record("peers.engines", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
