"""All that one H200 must show, in stages, the most important first: each a command with a time limit of its own.

    millrace bench gpu --out h200                              everything
    millrace bench gpu --out h200 --only parity logits         some of it; --list names the stages
    millrace bench gpu --out h200 --tests                      every test file that has tests marked gpu, instead
    millrace bench gpu --out dry --tiny                        the same commands over small shapes on a CPU

In OUT each stage leaves a log and its JSON (millrace_bench/stages.py), and gpu.json is the table. Exit code 1: a stage
failed, or there was no time for it. A missed target is no failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from millrace_bench.common import Record, print_record
from millrace_bench.stages import ROOT, WIDTH, Stage, results, run, table

TEST_LIMIT_S = 600.0
Results = dict[str, Any]

# ------------------------------------------------------------------------------------------------ what the table says


def _logits(found: Results) -> str:
    return ", ".join(f"{row['weights']} {row['path']} {row['median']:.4f}" for row in found["rows"])


def _eval(found: Results) -> str:
    whole = [(row["system"], row["all"]) for row in found["rows"]]
    return ", ".join(f"{name} {one['accuracy']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for name, one in whole)


def _engine(found: Results) -> str:
    texts = []
    for row in found["rows"]:
        variant = row.get("variant", "")
        if row["kind"] == "decode":
            exact = {True: ", equal to eager", False: ", NOT EQUAL to eager"}.get(row.get("exact"), "")
            texts.append(f"{variant} {row['step_ms']:.2f} ms, idle {row.get('idle', float('nan')):.1%}{exact}")
        elif row["kind"] == "ratio":
            texts.append(f"{variant} x{row['speedup']:.2f}")
        elif row["kind"] == "capture":
            texts.append(f"{variant} captured in {row['gc_off_s']} s, with the collector on {row['gc_on_s']} s")
        elif row["kind"] == "collector":
            texts.append(f"a collection {row['frozen_ms']:.1f} ms, thawed {row['thawed_ms']:.0f} ms")
    return "; ".join(texts)


def _shard(found: Results) -> str:
    texts = []
    for row in found["rows"]:
        fp8 = " FP8 KV" if row["kv_dtype"] == "float8_e4m3fn" else ""
        texts.append(f"{row['kind']} {row['count']}x{row['length']}{fp8} {row['ms']:.2f} ms")
    return ", ".join(texts)


def _startup(found: Results) -> str:
    return ", ".join(f"{row['caches']} {row['ready_s']:.0f} s" for row in found["rows"])


def _handover(found: Results) -> str:
    times = f"transfer {found['transfer_ms']['p50']:.2f} ms, hand-over {found['handover_ms']['p50']:.2f} ms"
    return f"{times}, {found['equal_to_unified']} of {found['prompts']} equal to unified"


def _kernels(found: Results) -> str:
    failed = sum("error" in row for row in found["rows"])
    return f"{len(found['rows'])} rows" + (f", {failed} with an error" if failed else "")


def _moe(found: Results) -> str:
    """The fastest of all against our kernel with an untuned configuration."""
    times = {row["impl"]: row["us"] for row in found["rows"] if row["shape"] == "T=512 TP8" and "error" not in row}
    untuned = times.pop("grouped, untuned", None)
    if untuned is None or not times:
        return _kernels(found)
    best = min(times, key=lambda impl: times[impl])
    return f"{_kernels(found)}; T=512 TP8: {best} {times[best]:.0f} us, untuned {untuned:.0f} us"


def _rows(found: Results) -> str:
    return f"{len(found['rows'])} rows"


# ------------------------------------------------------------------------------------------------ the stages

PYTEST = "pytest -p no:cacheprovider --tb=short"
ENGINE, SHARD = "millrace_bench.engine --shard tp8", "millrace_bench.shard"
EVAL, STARTUP = "millrace_bench.eval", "millrace_bench.startup"
HANDOVER, KERNELS = "millrace_bench.handover", "millrace_bench.kernels"
# A context of 1K in steps of 16 tokens: the kernels of longer steps, which need not be compiled then, are not measured.
STEPS = "--device cuda --batches 1 --prompt 1024 --outputs 100 --prefill-tokens 16"
START = "--device cuda --worker-set limits.max_model_len=8192"
TWO_WORKERS = (
    "--worker-set device=cuda memory_fraction=0.42 limits.max_model_len=4224 limits.max_running=4"
    " limits.max_prefill_tokens=4096"
)

STAGES = (
    Stage("parity", f"{PYTEST} tests/e2e/test_parity.py -m gpu", 560, "all pass"),
    Stage("logits", f"{EVAL} logits --device cuda", 180, "medians within BF16 0.02, FP8 0.08", _logits),
    Stage("graphs", f"{PYTEST} tests/engine/test_gpu.py -m gpu", 300, "graphs equal eager bit for bit"),
    Stage("eval", f"{EVAL} matrix --device cuda --num-items 40 --concurrency 16", 480, "within its error", _eval),
    Stage("engine", f"{ENGINE} {STEPS} --variants eager graph", 300, "idle < 3 %", _engine),
    Stage("startup", f"{STARTUP} --widths tp8 {START}", 560, "cold 360 s, warm 60 s", _startup),
    Stage("shard-tp8", f"{SHARD} --shard tp8 --decode 1x1024 1x4096 --profile", 200, "1x1024 4.5 ms", _shard),
    Stage(
        "shard-ep8",
        f"{SHARD} --shard ep8 --decode 128x4096 256x2048 --prefill 4x4096 16x1024"
        " --kv-dtype bfloat16 float8_e4m3fn --profile",
        400,
        "decode 42 ms, 48 ms; prefill 1250 ms, 1100 ms",
        _shard,
    ),
    Stage(
        "handover",
        f"{HANDOVER} --widths v3 --layers 6 --length 4096 --prompts 10 {TWO_WORKERS}",
        400,
        "transfer 3 ms, all equal",
        _handover,
    ),
    Stage("compile", f"{ENGINE} {STEPS} --layers 8 --variants eager graph compile", 420, "ratios", _engine),
    Stage("kernels-dense", f"{KERNELS} --group dense", 240, "the anchors", _kernels),
    Stage("kernels-attention", f"{KERNELS} --group attention", 240, "the anchors", _kernels),
    Stage("kernels-moe", f"{KERNELS} --group moe", 300, "the anchors; tuned against untuned", _moe),
    Stage("kernels-sampling", f"{KERNELS} --group sampling", 100, "the anchors", _kernels),
    Stage("startup-v3", f"{STARTUP} --widths v3 --layers 6 {START}", 560, "cold 360 s, warm 60 s", _startup),
    Stage("tune", "millrace_bench.kernels.tune --seconds 200", 260, "what is in use is best", _rows),
    Stage("tune-mid", "millrace_bench.kernels.tune_mid --seconds 150", 220, "as above", _rows),
    Stage("tune-moe", "millrace_bench.kernels.tune_moe --seconds 240", 300, "as above", _rows),
    Stage("tune-rows", "millrace_bench.kernels.tune_rows", 200, "as above", _rows),
    Stage("tune-attention", "millrace_bench.kernels.tune_attention --seconds 180", 260, "as above", _rows),
)

# The same over small shapes on a CPU, by stage. Tuners time configurations of a GPU; their tests run them on a CPU.
SMALL_STEPS = "--tiny --layers 2 --batches 1 --prompt 40 --outputs 12 --prefill-tokens 16"
SMALL_SHARD = "--tiny --layers 2 --repeats 2 --profile --decode 2x100"
SMALL = {
    "parity": f"{PYTEST} tests/e2e/test_parity.py -k 'unified_equals and cpu'",
    "logits": f"{EVAL} logits --num-texts 1",
    "graphs": f"{PYTEST} tests/engine/test_graphs.py",
    "eval": f"{EVAL} matrix --num-items 2 --tasks addition copy",
    "engine": f"{ENGINE} {SMALL_STEPS} --variants eager graph",
    "startup": f"{STARTUP} --widths tiny --layers 2 --worker-set limits.max_model_len=256",
    "shard-tp8": f"{SHARD} --shard tp8 {SMALL_SHARD}",
    "shard-ep8": f"{SHARD} --shard ep8 {SMALL_SHARD} --prefill 2x70 --kv-dtype bfloat16 float8_e4m3fn",
    "handover": f"{HANDOVER} --widths tiny --layers 2 --length 100 --prompts 3 --worker-set limits.max_model_len=256",
    "compile": f"{ENGINE} {SMALL_STEPS} --variants eager graph compile",
    "kernels-dense": f"{KERNELS} --group dense --device cpu --quick",
    "kernels-attention": f"{KERNELS} --group attention --device cpu --quick",
    "kernels-moe": f"{KERNELS} --group moe --device cpu --quick",
    "kernels-sampling": f"{KERNELS} --group sampling --device cpu --quick",
}


def small_stages() -> Iterator[Stage]:
    for stage in STAGES:
        if command := SMALL.get(stage.name):
            yield Stage(stage.name, command, stage.limit_s, "runs", stage.figures)


def stages_of_tests() -> Iterator[Stage]:
    """One for each file with tests marked gpu: a process of its own, because one that breaks its CUDA context breaks
    all that comes after it, and holds on to its memory.
    """
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        if "mark.gpu" in path.read_text():
            name = f"{path.parent.name}-{path.stem.removeprefix('test_')}"
            yield Stage(name, f"{PYTEST} {path.relative_to(ROOT)} -m gpu", TEST_LIMIT_S, "all pass")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="millrace bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these stages, in the order of all")
    parser.add_argument("--seconds", type=float, default=3 * 3600.0, help="for all stages together")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tests", action="store_true", help="the test files instead")
    kind.add_argument("--tiny", action="store_true", help="small shapes on a CPU: whether everything runs")
    parser.add_argument("--list", action="store_true", help="name the stages with their limits and commands")
    args = parser.parse_args()
    stages = list(stages_of_tests() if args.tests else small_stages() if args.tiny else STAGES)
    if unknown := set(args.only) - {stage.name for stage in stages}:
        parser.error(f"--only {' '.join(sorted(unknown))}: choose from {' '.join(stage.name for stage in stages)}")
    stages = [stage for stage in stages if not args.only or stage.name in args.only]
    console = Console(stderr=True, highlight=False, width=WIDTH)
    if args.list:
        for stage in stages:
            print(f"{stage.name:18}{stage.limit_s:5.0f} s  python -m {stage.command}")
        return
    outcomes = run(stages, args.out, args.seconds, console)
    console.print(table(outcomes))
    record = Record("gpu", vars(args), {"stages": results(outcomes)})
    (args.out / "gpu.json").write_text(record.to_json() + "\n")
    print_record(record)
    sys.exit(int(not all(outcome.passed for outcome in outcomes)))


if __name__ == "__main__":
    main()
