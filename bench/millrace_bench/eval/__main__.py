"""Accuracy of a running system or of a checkpoint on the task suite.

    millrace eval                                              whatever `millrace serve-local` runs, over gRPC
    millrace eval --model models/tiny --num-items 20           in process, with perplexity
    millrace eval --compare pair:models/tiny transformers:models/tiny
    millrace eval --http http://127.0.0.1:8000 --jsonl gsm8k.jsonl --shots 5
    millrace eval matrix                                       every way to serve a checkpoint against transformers
    millrace eval logits --device cuda                         BF16 and FP8 on a GPU against FP32 on a CPU

Prints tables, then one JSON line. Exit code 1: a request failed, or two systems disagree by more than one standard
error; 2: the command line is wrong.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from millrace_cli.cluster import TINY
from millrace_cli.errors import CommandError
from millrace_load.options import SET, CommandLine, number
from millrace_load.record import Record, print_record
from rich.console import Console

from millrace_bench.eval.report import (
    comparison_table,
    differences_table,
    evaluation_table,
    make_console,
    perplexity_line,
)
from millrace_bench.eval.run import Jobs, Suite, evaluate
from millrace_bench.eval.score import Comparison, Evaluation
from millrace_bench.eval.system import Kind, System
from millrace_bench.tasks import TASKS

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT = Suite()


def parser() -> CommandLine:
    parser = CommandLine("millrace eval", __doc__)
    where = parser.add_argument_group("what to evaluate (one of them)").add_mutually_exclusive_group()
    where.add_argument("--address", metavar="HOST:PORT", help=f"gRPC (default: {DEFAULT_ADDRESS})")
    where.add_argument("--http", metavar="URL", help="an OpenAI-compatible server")
    where.add_argument("--model", metavar="DIR", help="a checkpoint, in this process")
    where.add_argument("--transformers", metavar="DIR", help="a checkpoint with transformers, the reference")
    where.add_argument("--self-serve", choices=("pair", "unified"), help="start a system for this run")
    where.add_argument(
        "--compare", nargs=2, metavar=("A", "B"),
        help="both on the same items; each HOST:PORT, a URL, DIR, transformers:DIR, pair:DIR or unified:DIR",
    )  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", default=str(TINY), help="checkpoint of --self-serve")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of --model")
    parser.add_argument("--worker-set", nargs="+", **SET, help="of every worker or engine that this run starts")
    parser.add_argument("--concurrency", type=int, default=8, help="items at the same time")
    add_suite(parser)
    return parser


def add_suite(parser: CommandLine) -> None:
    items = parser.add_argument_group("items")
    names = ", ".join(TASKS)
    items.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"{names} (all; with --jsonl: none)")
    items.add_argument("--num-items", type=int, default=DEFAULT.num_items, help="most items per task (%(default)s)")
    items.add_argument(
        "--jsonl", type=Path, metavar="FILE", help='GSM8K-style lines {"question": …, "answer": … #### N}'
    )
    items.add_argument("--shots", type=number(int), default=DEFAULT.shots, help="examples from FILE (%(default)s)")
    items.add_argument("--max-tokens", type=int, default=DEFAULT.max_tokens, help="most output tokens (%(default)s)")
    items.add_argument("--temperature", type=number(float, 0, 100), default=DEFAULT.temperature, help="0: greedy")
    items.add_argument("--seed", type=number(int, 0, 2**31 - 1), default=DEFAULT.seed, help="of sampling (%(default)s)")


def suite_of(arguments: argparse.Namespace) -> Suite:
    default = () if arguments.jsonl else DEFAULT.tasks
    return Suite(
        tuple(arguments.tasks or default),
        arguments.num_items,
        arguments.jsonl,
        arguments.shots,
        arguments.max_tokens,
        arguments.temperature,
        arguments.seed,
    )


def jobs_of(suite: Suite) -> Jobs:
    try:
        return suite.jobs()
    except OSError as error:
        raise CommandError(f"--jsonl {suite.jsonl}: {error.strerror}", code=2) from error
    except ValueError as error:
        raise CommandError(str(error), code=2) from error


def systems_of(arguments: argparse.Namespace) -> list[System]:
    """One, or the two to be compared."""
    found, items = _systems(arguments), tuple(arguments.worker_set)
    ours = [system.kind in (Kind.MODEL, Kind.PAIR, Kind.UNIFIED) for system in found]
    if items and not any(ours):
        raise CommandError("--worker-set: no worker is started here, what runs elsewhere has its own settings", code=2)
    return [replace(one, worker_set=items) if here else one for one, here in zip(found, ours, strict=True)]


def _systems(arguments: argparse.Namespace) -> list[System]:
    if arguments.compare:
        return [System.parse(text, arguments.device) for text in arguments.compare]
    if arguments.self_serve:
        return [System(Kind(arguments.self_serve), arguments.checkpoint)]
    if arguments.http:
        return [System(Kind.HTTP, arguments.http)]
    if arguments.model:
        return [System(Kind.MODEL, arguments.model, arguments.device)]
    if arguments.transformers:
        return [System(Kind.TRANSFORMERS, arguments.transformers, arguments.device)]
    return [System(Kind.GRPC, arguments.address or DEFAULT_ADDRESS)]


def run(system: System, jobs: Jobs, concurrency: int, console: Console) -> Evaluation:
    evaluation = asyncio.run(evaluate(system, jobs, concurrency, console))
    console.print(evaluation_table(evaluation))
    console.print(perplexity_line(evaluation))
    for message, count in evaluation.failures.most_common(5):
        console.print(f"{count} failed: {message}", style="red", markup=False)
    return evaluation


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    if argv[:1] == ["matrix"]:
        from millrace_bench.eval import matrix  # needs torch; evaluating an address does not

        return matrix.main(argv[1:])
    if argv[:1] == ["logits"]:
        from millrace_bench.eval import logits

        return logits.main(argv[1:])
    arguments = parser().parse_args(argv)
    suite, systems, console = suite_of(arguments), systems_of(arguments), make_console()
    jobs = jobs_of(suite)
    evaluations = [run(system, jobs, arguments.concurrency, console) for system in systems]
    code = int(any(evaluation.failures for evaluation in evaluations))
    results = evaluations[0].as_dict()
    if arguments.compare:
        comparison = Comparison.of(*evaluations)
        console.print(comparison_table(comparison))
        if comparison.differences:
            console.print(differences_table(comparison))
        results = {"a": results, "b": evaluations[1].as_dict(), "comparison": comparison.as_dict()}
        code |= not comparison.agree
    config = asdict(suite) | {"concurrency": arguments.concurrency, "device": arguments.device}
    config |= {"worker_set": arguments.worker_set}
    print_record(Record("eval compare" if arguments.compare else "eval", config, results))
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CommandError as error:
        print(f"millrace eval: {error}", file=sys.stderr)
        sys.exit(error.code)
