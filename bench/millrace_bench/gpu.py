"""All that one H200 must show, in stages, the most important first: each a command with a time limit of its own.

    millrace bench gpu --out h200                              everything
    millrace bench gpu --out h200 --only parity logits         some of it; --list names the stages
    millrace bench gpu --out h200 --tests                      every test file that has tests marked gpu, instead
    millrace bench gpu --out dry --tiny                        the same commands over small shapes on a CPU

In OUT each stage leaves a log and its JSON (millrace_bench/stages.py), and gpu.json is the table. Exit code 1: a stage
failed, or there was no time for it. A missed target is no failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from millrace_bench.stages import PYTEST, ROOT, Stage, carry_out, command_line

TEST_LIMIT_S = 600.0

ENGINE, SHARD = "millrace_bench.engine --shard tp8", "millrace_bench.shard"
EVAL, STARTUP = "millrace_bench.eval", "millrace_bench.startup"
HANDOVER, KERNELS = "millrace_bench.handover", "millrace_bench.kernels"
TUNE = f"{KERNELS}.tune"
MATRIX = "matrix --num-items 40 --concurrency 16"
# A context of 1K in steps of 16 tokens: the kernels of longer steps, which need not be compiled then, are not measured.
STEPS = "--device cuda --batches 1 --prompt 1024 --outputs 100 --prefill-tokens 16"
DRAFTS = "millrace_bench.engine --device cuda --prefill-tokens 16"  # prompts are not computed
SWEEP = (
    "--batches 1 2 4 8 16 32 64 128 256 --set graphs=[1,2,4,8,16,32,64,128,256]"
    " --context 1024 --outputs 100 --drafts 0 1 2 3"
)
SERVING = "millrace_bench.drafts_serving"
START = "--device cuda --worker-set limits.max_model_len=8192"
TWO_WORKERS = (
    "--worker-set device=cuda memory_fraction=0.42 limits.max_model_len=4224 limits.max_running=4"
    " limits.max_prefill_tokens=4096"
)

STAGES = (
    Stage("parity", f"{PYTEST} tests/e2e/test_parity.py -m gpu", 560, "all pass"),
    Stage("logits", f"{EVAL} logits --device cuda", 180, "medians within BF16 0.02, FP8 0.08", "logits"),
    Stage("graphs", f"{PYTEST} tests/engine/step/test_gpu.py -m gpu", 300, "graphs equal eager bit for bit"),
    Stage("eval", f"{EVAL} {MATRIX} --device cuda", 480, "within its error", "evaluation"),
    Stage("engine", f"{ENGINE} {STEPS} --variants eager graph", 300, "idle < 3 %", "engine"),
    Stage("startup", f"{STARTUP} --widths tp8 {START}", 560, "cold 360 s, warm 60 s", "startup"),
    Stage("shard-tp8", f"{SHARD} --shard tp8 --decode 1x1024 1x4096 --profile", 200, "1x1024 4.5 ms", "shard"),
    Stage(
        "shard-ep8",
        f"{SHARD} --shard ep8 --decode 128x4096 256x2048 --prefill 4x4096 16x1024"
        " --kv-dtype bfloat16 float8_e4m3fn --profile",
        400,
        "decode 42 ms, 48 ms; prefill 1250 ms, 1100 ms",
        "shard",
    ),
    Stage(
        "handover",
        f"{HANDOVER} --widths v3 --layers 6 --length 4096 --prompts 10 {TWO_WORKERS}",
        400,
        "all equal",
        "handover",
    ),
    Stage(
        "drafts-tp8",
        f"{DRAFTS} --shard tp8 --batches 1 --context 1024 --outputs 200 --drafts 0 1 2 3",
        400,
        "x1.6",
        "drafts",
    ),
    Stage(
        "drafts-ep8",  # contexts up to 4,096; weights and KV take nearly all of the memory
        f"{DRAFTS} --shard ep8 --batches 128 --context 4032 --outputs 64 --drafts 0 1"
        " --set memory_fraction=0.98 --set graphs=[128]",
        400,
        "x1.28",
        "drafts",
    ),
    Stage("drafts-sweep", f"{DRAFTS} --shard tp8 {SWEEP}", 560, "limits.draft_batches", "drafts_sweep"),
    Stage("drafts-sweep-ep8", f"{DRAFTS} --shard ep8 {SWEEP}", 560, "limits.draft_batches", "drafts_sweep"),
    Stage(
        "drafts-serving",
        f"{SERVING} --widths e32 --layers 61 --worker-set device=cuda limits.max_prefill_tokens=4096",
        1040,
        "TPOT 14.8 ms without drafts",
        "drafts_serving",
    ),
    Stage("compile", f"{ENGINE} {STEPS} --layers 8 --variants eager graph compile", 420, "ratios", "engine"),
    Stage("kernels-dense", f"{KERNELS} --group dense", 240, "the anchors", "kernels"),
    Stage("kernels-attention", f"{KERNELS} --group attention", 240, "the anchors", "kernels"),
    Stage("kernels-absorb", f"{KERNELS} --group absorb", 400, "FP8 activations against BF16", "absorb"),
    Stage("kernels-moe", f"{KERNELS} --group moe", 300, "the anchors; tuned against untuned", "moe"),
    Stage("kernels-rivals", f"{KERNELS} --group rivals", 1080, "in the table where FlashInfer wins", "kernels"),
    Stage("kernels-sampling", f"{KERNELS} --group sampling", 100, "the anchors", "kernels"),
    Stage("onoff", "millrace_bench.onoff", 560, "gains above 1", "onoff"),
    Stage("startup-v3", f"{STARTUP} --widths v3 --layers 6 {START}", 560, "cold 360 s, warm 60 s", "startup"),
    Stage("tune", f"{TUNE} --all --seconds 900 --folder build/tuned", 1080, "what is in use is best", "rows"),
)

# The same over small shapes on a CPU, by stage. Tuners time configurations of a GPU; their tests run them on a CPU.
SMALL_STEPS = "--tiny --layers 2 --batches 1 --prompt 40 --outputs 12 --prefill-tokens 16"
SMALL_DRAFTS = "--tiny --layers 2 --context 40 --outputs 40 --prefill-tokens 16 --set graphs=on"
SMALL_SHARD = "--tiny --layers 2 --repeats 2 --profile --decode 2x100"
SMALL = {
    "parity": f"{PYTEST} tests/e2e/test_parity.py -k 'unified_equals and cpu'",
    "logits": f"{EVAL} logits --num-texts 1",
    "graphs": f"{PYTEST} tests/engine/step/test_graphs.py",
    "eval": f"{EVAL} matrix --num-items 2 --tasks addition copy",
    "engine": f"{ENGINE} {SMALL_STEPS} --variants eager graph",
    "startup": f"{STARTUP} --widths tiny --layers 2 --worker-set limits.max_model_len=256",
    "shard-tp8": f"{SHARD} --shard tp8 {SMALL_SHARD}",
    "shard-ep8": f"{SHARD} --shard ep8 {SMALL_SHARD} --prefill 2x70 --kv-dtype bfloat16 float8_e4m3fn",
    "handover": f"{HANDOVER} --widths tiny --layers 2 --length 100 --prompts 3 --worker-set limits.max_model_len=256",
    "drafts-tp8": f"{ENGINE} {SMALL_DRAFTS} --batches 1 --drafts 0 1 2 3",
    "drafts-ep8": f"millrace_bench.engine --shard ep8 {SMALL_DRAFTS} --batches 2 --drafts 0 1",
    "drafts-sweep": f"{ENGINE} {SMALL_DRAFTS} --batches 1 2 4 --drafts 0 1 2 3",
    "drafts-sweep-ep8": f"millrace_bench.engine --shard ep8 {SMALL_DRAFTS} --batches 1 3 --drafts 0 3",
    "drafts-serving": f"{SERVING} --widths tiny --layers 2 --input-len 64 --output-len 24 --drafts 0 2",
    "compile": f"{ENGINE} {SMALL_STEPS} --variants eager graph compile",
    "kernels-dense": f"{KERNELS} --group dense --device cpu --quick",
    "kernels-attention": f"{KERNELS} --group attention --device cpu --quick",
    "kernels-absorb": f"{KERNELS} --group absorb --device cpu --quick",
    "kernels-moe": f"{KERNELS} --group moe --device cpu --quick",
    "kernels-rivals": f"{KERNELS} --group rivals --device cpu --quick",
    "kernels-sampling": f"{KERNELS} --group sampling --device cpu --quick",
    "onoff": "millrace_bench.onoff --tiny",
}


def small_stages() -> Iterator[Stage]:
    for stage in STAGES:
        if command := SMALL.get(stage.name):
            yield replace(stage, command=command, target="runs")


def stages_of_tests() -> Iterator[Stage]:
    """One for each file with tests marked gpu: a process of its own, because one that breaks its CUDA context breaks
    all that comes after it, and holds on to its memory.
    """
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        if "mark.gpu" in path.read_text():
            name = f"{path.parent.name}-{path.stem.removeprefix('test_')}"
            yield Stage(name, f"{PYTEST} {path.relative_to(ROOT)} -m gpu", TEST_LIMIT_S, "all pass")


def main() -> None:
    parser = command_line("gpu", __doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tests", action="store_true", help="run the test files instead")
    kind.add_argument("--tiny", action="store_true", help="small shapes on a CPU: whether everything runs")
    args = parser.parse_args()
    stages = list(stages_of_tests() if args.tests else small_stages() if args.tiny else STAGES)
    carry_out("gpu", stages, parser, args)


if __name__ == "__main__":
    main()
