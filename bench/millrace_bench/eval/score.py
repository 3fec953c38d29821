"""From answers to figures: accuracy with its interval, and whether two evaluations agree."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace_bench.eval.backend import Answer, Job, Perplexity
from millrace_bench.tasks import Item, Verdict, judge, wilson_interval

ALL = "all"


@dataclass(frozen=True, slots=True)
class Judged:
    item: Item
    answer: Answer
    verdict: Verdict | None  # None: the request failed

    @classmethod
    def of(cls, item: Item, answer: Answer) -> "Judged":
        return cls(item, answer, None if answer.error else judge(item, answer.text))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A failed request counts as an item that is not correct."""

    name: str
    judged: tuple[Judged, ...]
    seconds: float

    @classmethod
    def of(cls, name: str, jobs: Sequence[Job], answers: Sequence[Answer], seconds: float) -> "TaskResult":
        pairs = zip(jobs, answers, strict=True)
        return cls(name, tuple(Judged.of(job.item, answer) for job, answer in pairs), seconds)

    @classmethod
    def sum(cls, results: "Iterable[TaskResult]") -> "TaskResult":
        results = tuple(results)
        return cls(ALL, tuple(one for r in results for one in r.judged), math.fsum(r.seconds for r in results))

    def count(self, verdict: Verdict | None) -> int:
        return sum(one.verdict is verdict for one in self.judged)

    def tokens(self, kind: Callable[[Answer], int]) -> int:
        return sum(kind(one.answer) for one in self.judged)

    @property
    def items(self) -> int:
        return len(self.judged)

    @property
    def correct(self) -> int:
        return self.count(Verdict.CORRECT)

    @property
    def accuracy(self) -> float:
        return self.correct / self.items

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.correct, self.items)

    @property
    def output_rate(self) -> float:
        """Output tokens per second of the task's whole time, prompts included."""
        return self.tokens(lambda answer: answer.output_tokens) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "items": self.items,
            "correct": self.correct,
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "invalid": self.count(Verdict.INVALID),
            "failed": self.count(None),
            "seconds": self.seconds,
            "prompt_tokens": self.tokens(lambda answer: answer.prompt_tokens),
            "cached_tokens": self.tokens(lambda answer: answer.cached_tokens),
            "output_tokens": self.tokens(lambda answer: answer.output_tokens),
            "output_tokens_per_s": self.output_rate,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One system's results on all tasks."""

    system: str
    tasks: tuple[TaskResult, ...]
    perplexity: Perplexity | None

    @property
    def whole(self) -> TaskResult:
        return TaskResult.sum(self.tasks)

    @property
    def failures(self) -> Counter[str]:
        """Messages of failed requests."""
        return Counter(one.answer.error for one in self.whole.judged if one.answer.error)

    def as_dict(self) -> dict[str, Any]:
        wrong = [
            {"item": f"{task.name}[{index}]", "expected": one.item.answer, "text": one.answer.text}
            for task in self.tasks
            for index, one in enumerate(task.judged)
            if one.verdict in (Verdict.WRONG, Verdict.INVALID)
        ]
        return {
            "system": self.system,
            "tasks": {task.name: task.as_dict() for task in self.tasks},
            ALL: self.whole.as_dict(),
            "perplexity": self.perplexity and asdict(self.perplexity),
            "failures": dict(self.failures),
            "wrong": wrong,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """An item whose two answers are not the same."""

    item: str  # task and index
    expected: str
    a: Judged
    b: Judged

    def as_dict(self) -> dict[str, Any]:
        sides = {
            side: {"text": one.answer.text, "verdict": one.verdict.value if one.verdict else one.answer.error}
            for side, one in (("a", self.a), ("b", self.b))
        }
        return {"item": self.item, "expected": self.expected, **sides}


@dataclass(frozen=True, slots=True)
class Line:
    """One task, or all of them, in a comparison."""

    name: str
    items: int
    same: int  # items with the same answer
    a: float  # accuracies
    b: float
    standard_error: float  # of their difference

    @property
    def agree(self) -> bool:
        return abs(self.a - self.b) <= self.standard_error


@dataclass(frozen=True, slots=True)
class Comparison:
    a: str
    b: str
    lines: tuple[Line, ...]  # one for each task, then one for all of them
    differences: tuple[Difference, ...]

    @classmethod
    def of(cls, a: Evaluation, b: Evaluation) -> "Comparison":
        """Of two evaluations on the same items."""
        lines = [_line(left, right) for left, right in zip((*a.tasks, a.whole), (*b.tasks, b.whole), strict=True)]
        differences = [
            Difference(f"{left.name}[{index}]", one.item.answer, one, other)
            for left, right in zip(a.tasks, b.tasks, strict=True)
            for index, (one, other) in enumerate(zip(left.judged, right.judged, strict=True))
            if not one.answer.same_as(other.answer)
        ]
        return cls(a.system, b.system, tuple(lines), tuple(differences))

    @property
    def agree(self) -> bool:
        """No accuracy, of a task or of all, differs by more than one standard error."""
        return all(line.agree for line in self.lines)

    @property
    def identical(self) -> bool:
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "agree": self.agree,
            "identical": self.identical,
            "tasks": {line.name: asdict(line) | {"agree": line.agree} for line in self.lines},
            "differences": [difference.as_dict() for difference in self.differences],
        }


def _line(a: TaskResult, b: TaskResult) -> Line:
    same = sum(one.answer.same_as(other.answer) for one, other in zip(a.judged, b.judged, strict=True))
    return Line(a.name, a.items, same, a.accuracy, b.accuracy, standard_error(a.correct, b.correct, a.items))


def standard_error(a: int, b: int, items: int) -> float:
    """Of the difference of two accuracies, with one success and one failure added to each (Agresti and Caffo 2000,
    The American Statistician 54, 280-288): without them it would be 0 for two perfect systems.
    """
    p, q = (a + 1) / (items + 2), (b + 1) / (items + 2)
    return math.sqrt((p * (1 - p) + q * (1 - q)) / (items + 2))
