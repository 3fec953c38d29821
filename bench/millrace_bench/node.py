"""A whole host of GPUs that compute together, in stages, the most important first: V3's shapes, random FP8 weights.

    millrace bench node --out node                       the 671B model on eight GPUs
    millrace bench node --out node --gpus 2              the same with 32 experts for each GPU there is
    millrace bench node --out node --gpus 2 --layers 28  for GPUs of 80 GB, which do not hold 61 layers
    millrace bench node --out node --only decode skew    some of it; --list names the stages
    millrace bench node --out dry --tiny                 most of the stages over small shapes on a CPU
    millrace bench node --preset k8s/golden/h200-8gpu-unified.yaml   stages of whole systems, as the chart installs them

In OUT each stage leaves a log and its JSON (millrace_bench/stages.py), and node.json is the table. Exit code 1: a stage
failed, or there was no time for it. A missed target is no failure; targets are those of eight GPUs.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from millrace_bench import preset, v3
from millrace_bench.stages import PYTEST, Stage, carry_out, command_line

WIDTHS = {2: "e64", 4: "e128", 8: "v3"}  # by GPUs: 32 experts of each
SIZES = "--decode 256x2048 128x4096 --prefill 4x4096"  # of each GPU
NUM_PROMPTS, CLIENTS = 1250, 256  # of a GPU, of the rows that the source documents measure


@dataclass(frozen=True, slots=True)
class Host:
    gpus: int
    layers: int
    model: Path  # a folder with config.json and tokenizer of this shape
    installed: tuple[str, ...] = ()  # settings of a preset's worker, instead of those that fit each load best

    @property
    def shape(self) -> str:
        return f"--widths {WIDTHS[self.gpus]} --layers {self.layers}"


def stages(host: Host) -> list[Stage]:
    name = "eight_ranks" if host.gpus == 8 else "balance_ranks"  # of two
    tokens = f"tests/engine/step/test_{name}.py"
    lost = "tests/worker/test_lost_ranks.py"
    return [
        Stage("tokens", f"{PYTEST} {tokens} -m gpu", 900, "those of one rank"),
        Stage("lost", f"{PYTEST} {lost} -m gpu", 900, "a lost rank is named"),
        *_steps(host),
        *_systems(host),
        _replicas(host, "deepep", "--exchange deepep", "beside peer and gather", SIZES),  # needs the extra `deepep`
    ]


def _steps(host: Host) -> list[Stage]:
    """Without a server."""
    ranks = f"--ranks {host.gpus} --layers {host.layers}"
    alone = f"millrace_bench.ranks {ranks} --experts {32 * host.gpus} --exchange none peer {SIZES} --profile"
    tp = f"millrace_bench.engine --shard tp8 {ranks} --sums fused nccl --device cuda --batches 1"
    skewed = "--exchange peer --skew 'power law' 'power law, sorted' --spare 0 1"
    drafted = "1 draft: 24,000 tokens/s, ITL under 50 ms"
    return [
        _replicas(host, "decode", "--exchange peer gather", "40,000 (256x2048) and 90,000 tokens/s", SIZES),
        _replicas(host, "drafts", "--exchange peer --drafts 0 1", drafted, "--decode 128x4096"),
        Stage("alone", alone, 1200, "the share of communication", "ranks"),
        _replicas(host, "skew", skewed, "faster with a spare expert", "--decode 128x4096 --prefill 4x4096"),
        Stage(
            "tp",
            f"{tp} --context 1024 --outputs 200 --prefill-tokens 16 --drafts 0 3",
            900,
            "0 drafts 4.6 ms; 3 drafts 380 tokens/s",
            "sums",
        ),
    ]


def _replicas(host: Host, name: str, how: str, target: str, sizes: str) -> Stage:
    bench = f"millrace_bench.replicas --dp {host.gpus} {host.shape}"
    return Stage(name, f"{bench} {how} {sizes}", 1500, target, "replicas")


def _systems(host: Host) -> list[Stage]:
    """Router and workers, as a client sees them."""
    half = Host(host.gpus, host.layers // 2, host.model)  # as many layers as half of the GPUs hold
    handed = f"millrace_bench.handover {half.shape} --length 4096 --prompts 20"
    each = f"dp={host.gpus // 2} limits.max_model_len=4224 limits.max_running=4 limits.max_prefill_tokens=4096"
    start = f"millrace_bench.startup {host.shape} --device cuda"
    return [
        *_loads(host),
        Stage("handover", f"{handed} --worker-set device=cuda {each}", 900, "1 ms at p50", "handover"),
        Stage(
            "startup",
            f"{start} --worker-set dp={host.gpus} limits.max_model_len=8192",
            1500,
            "warm 60 s",
            "startup",
        ),
    ]


def _loads(host: Host) -> list[Stage]:
    """Of a whole system with one worker."""
    return [
        _first_token(host, 1600, "60 ms"),
        _first_token(host, 8192, "200 ms"),
        _seeds(host, 512, 1, "90,000 prompt tokens/s"),
        _seeds(host, 1, 512, "36,000 output tokens/s"),
    ]


def installed(file: Path, gpus: int) -> tuple[str, ...]:
    """Settings of the one worker of a preset, scaled to the GPUs. Raises PresetError."""
    pools = preset.load(file).scaled(gpus).pools
    if [pool.role for pool in pools] != ["unified"]:
        raise preset.PresetError(f"{file}: its pools are {[pool.role for pool in pools]}; bench pd takes them")
    return pools[0].settings


def _first_token(host: Host, length: int, target: str) -> Stage:
    """Of one prompt at a time, on tensor-parallel ranks."""
    alone = f"--batches 1 --rounds 20 --input-len {length} --output-len 8 --ignore-eos"
    command = f"{_served(host, f'tp={host.gpus}', length, 8, length)} {alone}"
    return Stage(f"ttft-{length}", command, 900, target, "first_token")


def _served(host: Host, ranks: str, length: int, running: int, prefill_tokens: int) -> str:
    """A system of one worker; sequences have at most `length` tokens and a page, unless a preset says otherwise."""
    own = ["device=cuda", ranks, f"limits.max_model_len={length + 64}", f"limits.max_running={running}"]
    own.append(f"limits.max_prefill_tokens={prefill_tokens}")
    items = shlex.join(["random_weights=true", *(host.installed or own)])
    return f"millrace_load.serving --self-serve --unified --model {shlex.quote(str(host.model))} --worker-set {items}"


def _seeds(host: Host, prompt: int, output: int, target: str) -> Stage:
    """As the source documents load a host: a closed loop of many clients, attention of every replica by itself."""
    served = _served(host, f"dp={host.gpus}", prompt + output, CLIENTS, 16384)
    sizes = f"--input-len {prompt} --output-len {output} --ignore-eos"
    load = f"--num-requests {NUM_PROMPTS * host.gpus} --concurrency {CLIENTS * host.gpus} {sizes}"
    return Stage(f"seeds-{prompt}-{output}", f"{served} {load}", 900, target, "serving")


# The same over small shapes on a CPU, by stage. DeepEP has no CPU.
SMALL = "millrace_bench.replicas --dp 2 --widths tiny --layers 2 --device cpu --set graphs=on --steps 6"
SMALL_WORKER = "random_weights=true limits.max_model_len=256 limits.num_pages=40"
SMALL_SERVED = "millrace_load.serving --self-serve --unified --num-requests 8 --warmup 1"


def small_stages(model: Path, installed: tuple[str, ...] = ()) -> dict[str, str]:
    """Commands by stage. `model`: a folder of the widths `tiny`. `installed`: as of Host."""
    served = f"{SMALL_SERVED} --model {shlex.quote(str(model))} --worker-set {shlex.join(installed)} {SMALL_WORKER}"
    one = "--batches 1 --rounds 2 --input-len 60 --output-len 2 --ignore-eos"
    return {
        "decode": f"{SMALL} --exchange gather --decode 2x100 --prefill 2x70",
        "drafts": f"{SMALL} --exchange gather --decode 2x100 --drafts 0 1",
        "alone": "millrace_bench.ranks --ranks 2 --experts 16 --layers 2 --exchange none gather --decode 2x100 --tiny"
        " --repeats 2",
        "skew": f"{SMALL} --exchange gather --skew 'power law, sorted' --spare 0 1 --decode 2x100",
        "tp": "millrace_bench.engine --shard tp8 --ranks 2 --sums nccl --tiny --layers 2 --batches 1 --context 40"
        " --outputs 40 --prefill-tokens 16 --drafts 0 3",
        "ttft-1600": f"{served} tp=2 {one}",
        "handover": "millrace_bench.handover --widths tiny --layers 2 --length 100 --prompts 3"
        " --worker-set dp=2 limits.max_model_len=256",
        "seeds-512-1": f"{served} dp=2 --concurrency 4 --input-len 60 --output-len 1 --ignore-eos",
        "seeds-1-512": f"{served} dp=2 --concurrency 4 --input-len 1 --output-len 60 --ignore-eos",
        "startup": "millrace_bench.startup --widths tiny --layers 2 --worker-set dp=2 limits.max_model_len=256",
    }


def main() -> None:
    parser = command_line("node", __doc__)
    parser.add_argument("--gpus", type=int, default=8, choices=WIDTHS, help="GPUs to use (%(default)s)")
    parser.add_argument("--layers", type=int, default=61, help="layers of V3's 61 (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU: whether everything runs")
    parser.add_argument("--preset", type=Path, metavar="FILE", help="preset whose worker is measured")
    args = parser.parse_args()
    host = Host(args.gpus, args.layers, (args.out / "model").absolute())
    try:
        host = replace(host, installed=installed(args.preset, args.gpus) if args.preset else ())
    except preset.PresetError as error:
        parser.error(f"--preset: {error}")
    found = _loads(host) if args.preset else stages(host)
    if args.tiny:
        small = small_stages(host.model, host.installed)
        found = [replace(one, command=small[one.name], target="runs") for one in found if one.name in small]
    if not args.list:
        v3.write_folder(host.model, *(("tiny", 2) if args.tiny else (WIDTHS[host.gpus], host.layers)))
    carry_out("node", found, parser, args)


if __name__ == "__main__":
    main()
