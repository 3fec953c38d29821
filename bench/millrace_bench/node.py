"""A whole host of GPUs that compute together, in stages, the most important first: V3's shapes, random FP8 weights.

    millrace bench node --out node                       the 671B model on eight GPUs
    millrace bench node --out node --gpus 2              the same with 32 experts for each GPU there is
    millrace bench node --out node --gpus 2 --layers 28  for GPUs of 80 GB, which do not hold 61 layers
    millrace bench node --out node --only decode skew    some of it; --list names the stages
    millrace bench node --out dry --tiny                 most of the stages over small shapes on a CPU
    millrace bench node --preset k8s/golden/h200-8gpu-unified.yaml   stages of whole systems, as the chart installs them

bench/data/node.yaml.jinja has the stages. In OUT each leaves a log and its JSON (millrace_bench/stages.py), and
node.json is the table. Exit code 1: a stage failed, or there was no time for it. A missed target is no failure; targets
are those of eight GPUs.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from millrace_bench import preset, v3
from millrace_bench.stages import PYTEST, Stage, carry_out, command_line, read_stages, small_stages

WIDTHS = {2: "e64", 4: "e128", 8: "v3"}  # by GPUs: 32 experts of each
LOADS = ("ttft-", "seeds-")  # stages of a whole system with one worker


@dataclass(frozen=True, slots=True)
class Host:
    gpus: int
    layers: int
    model: Path  # a folder with config.json and tokenizer of this shape
    installed: tuple[str, ...] = ()  # settings of a preset's worker, instead of those that fit each load best


def stages(host: Host) -> list[Stage]:
    return read_stages(
        "node.yaml.jinja",
        gpus=host.gpus,
        layers=host.layers,
        widths=WIDTHS[host.gpus],
        model=shlex.quote(str(host.model)),
        installed=shlex.join(host.installed),
        pytest=PYTEST,
    )


def loads(host: Host) -> list[Stage]:
    return [stage for stage in stages(host) if stage.name.startswith(LOADS)]


def installed(file: Path, gpus: int) -> tuple[str, ...]:
    """Settings of the one worker of a preset, scaled to the GPUs. Raises PresetError."""
    pools = preset.load(file).scaled(gpus).pools
    if [pool.role for pool in pools] != ["unified"]:
        raise preset.PresetError(f"{file}: its pools are {[pool.role for pool in pools]}; bench pd takes them")
    return pools[0].settings


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
    found = loads(host) if args.preset else stages(host)
    found = small_stages(found) if args.tiny else found
    if not args.list:
        v3.write_folder(host.model, *(("tiny", 2) if args.tiny else (WIDTHS[host.gpus], host.layers)))
    carry_out("node", found, parser, args)


if __name__ == "__main__":
    main()
