"""How fast the steps of a replica are, as it measures them."""

from collections import deque
from dataclasses import astuple

from millrace_common.rate import Rate
from millrace_common.step_times import StepTimes

from millrace_serve.engine.schedule.plan import Plan, StepOutput, Work
from millrace_serve.engine.schedule.step_fit import StepFit

RECENT = 9  # steps by which the speed of a sequence is told


class Speeds:
    def __init__(self, start: StepTimes) -> None:
        """`start`: what is known of other replicas."""
        self._fit = StepFit(start)
        self._prompts = Rate()
        self._token_s: deque[float] = deque(maxlen=RECENT)  # seconds of one sequence's token in the latest steps
        self._committed_at = 0.0
        self._launched: list[float] = []  # predicted seconds of steps that were launched and not committed

    def launched(self, work: Work) -> None:
        self._launched.append(self.times.step_s(*work))

    def done_at(self, now: float) -> float:
        """When the launched steps are predicted to be done."""
        return max(now, self._committed_at + sum(self._launched))

    def committed(self, plan: Plan, output: StepOutput, now: float) -> None:
        """A launched step computes from the end of the one before it. One that is planned only then (`Plan.awaited`)
        also takes the time of its planning and launch: its tokens come that much later.
        """
        seconds, rows = now - max(plan.began, self._committed_at), len(plan.decode)
        self._committed_at = now
        del self._launched[:1]
        if any(plan.work):
            self._fit.add(plan.work, seconds)
        if plan.chunks:
            self._prompts.add(sum(chunk.end - chunk.start for chunk in plan.chunks), seconds)
        elif rows:
            self._token_s.append(seconds * rows / int(output.counts[:rows].sum()))

    @property
    def times(self) -> StepTimes:
        return self._fit.times

    @property
    def measured(self) -> tuple[float, ...]:
        """`times` for reports; none while they are unknown."""
        return astuple(self.times) if self.times.known else ()

    @property
    def prompt_tokens_per_s(self) -> float:
        """In steps with prompts; 0: not measured."""
        return self._prompts.per_s

    @property
    def output_tokens_per_s(self) -> float:
        """Of one sequence, in steps without prompts; 0: not measured. The median: behind a step that was committed late
        the next one seems to take less.
        """
        median = sorted(self._token_s)[len(self._token_s) // 2] if self._token_s else 0.0
        return 1 / median if median else 0.0
