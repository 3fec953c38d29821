"""All that one H200 must show, in the stages of bench/data/gpu.yaml, the most important first: each a command with a
time limit of its own.

    millrace bench gpu --out h200                              everything
    millrace bench gpu --out h200 --only parity logits         some of it; --list names the stages
    millrace bench gpu --out h200 --tests                      every test file that has tests marked gpu, instead
    millrace bench gpu --out dry --tiny                        the same commands over small shapes on a CPU

In OUT each stage leaves a log and its JSON (millrace_bench/stages.py), and gpu.json is the table. Exit code 1: a stage
failed, or there was no time for it. A missed target is no failure.
"""

from collections.abc import Iterator

from millrace_bench.stages import PYTEST, ROOT, Stage, carry_out, command_line, read_stages, small_stages

TEST_LIMIT_S = 600.0
STAGES = read_stages("gpu.yaml")


def stages_of_tests() -> Iterator[Stage]:
    """One for each file with tests marked gpu: a process of its own, because one that breaks its CUDA context breaks
    all that comes after it, and holds on to its memory.
    """
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.gpu" in path.read_text():
            name = f"{path.parent.name}-{path.stem.removeprefix('test_')}"
            yield Stage(name, f"{PYTEST} {path.relative_to(ROOT)} -m gpu", TEST_LIMIT_S, "all pass")


def main() -> None:
    parser = command_line("gpu", __doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tests", action="store_true", help="run the test files instead")
    kind.add_argument("--tiny", action="store_true", help="small shapes on a CPU: whether everything runs")
    args = parser.parse_args()
    stages = list(stages_of_tests()) if args.tests else small_stages(STAGES) if args.tiny else STAGES
    carry_out("gpu", stages, parser, args)


if __name__ == "__main__":
    main()
