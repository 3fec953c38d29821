"""How many drafts a checkpoint's own MTP layer gets right, on held-out text and on every task of the evaluation suite.

python -m millrace_bench.drafts [--model models/tiny] [--num-items 10] [--temperatures 0 1]

One engine after the other in this process, without drafts and with 1, 2 and 3, on the same prompts and seeds.

    position N   part of the verified drafts in that place behind the last token that became output tokens; drafts
                 behind the end of an answer do not
    accept       tokens of an answer that a decode step gave
    same         answers that are those without drafts, token by token; exit code 1 when one differs
"""

import asyncio
import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace_cli.cluster import TINY
from millrace_load.options import CommandLine, checkpoint, number
from millrace_load.record import Record, Row, print_record, printed

from millrace_bench.data import TEXTS
from millrace_bench.eval.backend import Answer, Job
from millrace_bench.eval.in_process import EngineBackend
from millrace_bench.eval.run import Suite
from millrace_bench.tasks import TASKS, Item, Match

TEXT = "text"  # the name of continuing held-out texts, beside the tasks'


@dataclass(frozen=True, slots=True)
class Work:
    """Jobs of one kind at one temperature. `prompts`: texts to be continued; empty: the jobs' own conversations."""

    name: str
    temperature: float
    jobs: list[Job]
    prompts: list[str]


def works(tasks: Sequence[str], num_items: int, temperatures: Sequence[float], tokens: int) -> list[Work]:
    """`tokens`: of the continuation of the first half of each text."""
    halves = [text[: len(text) // 2] for text in TEXTS[:num_items]]
    found = []
    for temperature in temperatures:
        item = Item(TEXT, "", (), "", Match.EXACT, tokens)
        jobs = [Job(item, temperature, seed) for seed in range(len(halves))]
        found.append(Work(TEXT, temperature, jobs, halves))
        suite = Suite(tuple(tasks), num_items, temperature=temperature)
        found += [Work(name, temperature, jobs, []) for name, jobs in suite.jobs().items()]
    return found


async def run(folder: Path, drafts: int, concurrency: int, plan: Sequence[Work]) -> list[tuple[Row, list[Answer]]]:
    """Of each work, its row and its answers."""
    own = (f"limits.draft_tokens={drafts}", f"limits.draft_batches={[concurrency] * drafts}")
    found = []
    with contextlib.closing(EngineBackend(folder, "cpu", concurrency, own)) as backend:
        for work in plan:
            before = backend.load()
            answers = await (
                backend.complete(work.prompts, work.jobs) if work.prompts else backend.answer(work.jobs, lambda: None)
            )
            after = backend.load()
            drafted, accepted = (
                _since(getattr(before, name), getattr(after, name)) for name in ("drafted", "accepted")
            )
            row: Row = {"drafts": drafts, "temperature": work.temperature, "task": work.name}
            row |= {"tokens": sum(answer.output_tokens for answer in answers)}
            row |= {"drafted": drafted, "accepted": accepted, "accept": accept_length(answers)}
            found.append((row, answers))
    return found


def _since(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [now - then for now, then in zip(after, before or (0,) * len(after), strict=True)]


def accept_length(answers: Sequence[Answer]) -> float:
    """NaN without decode steps."""
    steps = sum(answer.decode_steps for answer in answers)
    return round(sum(answer.output_tokens - 1 for answer in answers) / steps, 3) if steps else math.nan


def compare(without: Sequence[tuple[Row, list[Answer]]], found: Sequence[tuple[Row, list[Answer]]]) -> list[Row]:
    """The rows of `found`, with the number of answers that drafts did not change."""
    rows = []
    for (_, expected), (row, answers) in zip(without, found, strict=True):
        same = sum(one.same_as(other) for one, other in zip(expected, answers, strict=True))
        rows.append({**row, "items": len(answers), "same": same})
    return rows


def main() -> None:
    parser = CommandLine("python -m millrace_bench.drafts", "How many drafts of a checkpoint's own MTP are accepted.")
    parser.add_argument("--model", type=checkpoint, default=TINY, help="checkpoint folder (%(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--num-items", type=int, default=10, help="items per task, and texts, at most (%(default)s)")
    parser.add_argument("--temperatures", type=number(float), nargs="+", default=[0.0, 1.0])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3], choices=range(1, 4))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a text's continuation (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="sequences of a step (%(default)s)")
    args = parser.parse_args()
    plan = works(args.tasks, args.num_items, args.temperatures, args.tokens)
    without = asyncio.run(run(args.model, 0, args.concurrency, plan))
    rows: list[Row] = []
    for drafts in args.drafts:
        rows += printed(compare(without, asyncio.run(run(args.model, drafts, args.concurrency, plan))))
    print_record(Record("drafts", vars(args), {"rows": rows}))
    sys.exit(int(any(row["same"] != row["items"] for row in rows)))


if __name__ == "__main__":
    main()
