"""Runs items through systems: one, two on the same items, with progress on the console."""

import time
from dataclasses import dataclass
from pathlib import Path

from millrace_load.serving import progress
from rich.console import Console

from millrace_bench.eval.backend import Answer, Backend, Job
from millrace_bench.eval.score import Evaluation, TaskResult
from millrace_bench.eval.system import System
from millrace_bench.gsm8k import read_items
from millrace_bench.tasks import TASKS, Item

ITEM_SEED = 0  # everybody evaluates the same items
Jobs = dict[str, list[Job]]  # by task


@dataclass(frozen=True, slots=True)
class Suite:
    """Which items, and how their answers are sampled."""

    tasks: tuple[str, ...] = tuple(TASKS)
    num_items: int = 100  # of each task, at most
    jsonl: Path | None = None
    shots: int = 5
    max_tokens: int = 512  # of an answer to an item of `jsonl`
    temperature: float = 0.0
    seed: int = 0

    def jobs(self) -> Jobs:
        """ValueError and OSError name what cannot be had."""
        items = {name: TASKS[name].items(ITEM_SEED, self.num_items) for name in self.tasks}
        if self.jsonl is not None:
            items[self.jsonl.name] = read_items(self.jsonl, self.shots, self.max_tokens)[: self.num_items]
        return {name: [self._job(index, item) for index, item in enumerate(found)] for name, found in items.items()}

    def _job(self, index: int, item: Item) -> Job:
        """Each item has its own noise, the same in every run with this seed."""
        return Job(item, self.temperature, self.seed * 1_000_000 + index)


async def evaluate(system: System, jobs: Jobs, concurrency: int, console: Console) -> Evaluation:
    """CommandError when the system cannot be used at all; single failures are in the result."""
    async with system.open(concurrency) as backend:
        return await measure(str(system), backend, jobs, console)


async def measure(name: str, backend: Backend, jobs: Jobs, console: Console, warm: int = 0) -> Evaluation:
    """`warm`: asks that many jobs, and then the same ones again, which count: their prompts are in the prefix cache."""
    results = []
    with progress(console, transient=True) as begin:
        for task, work in jobs.items():
            done = begin(f"{name} {task}", len(work))
            answers: list[Answer] = []
            seconds = 0.0
            for start in range(0, len(work), warm or len(work)):
                part = work[start : start + (warm or len(work))]
                if warm:
                    await backend.answer(part, lambda: None)
                started = time.perf_counter()
                answers += await backend.answer(part, done)
                seconds += time.perf_counter() - started
            results.append(TaskResult.of(task, work, answers, seconds))
    return Evaluation(name, tuple(results), await backend.perplexity())
