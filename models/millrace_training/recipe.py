"""How the shipped model was trained: every number of it.

A phase has its own mixture and its own learning rate: a linear warm-up, then a cosine. Within it, stages change the
shape of the batches. The first phase teaches everything, short rows before long ones; the second is short and repeats
what was weakest, copying, made harder.
"""

import math
from dataclasses import dataclass

from millrace_bench.tasks import ADJECTIVES, NOUNS


@dataclass(frozen=True)
class Stage:
    steps: int
    length: int  # tokens of a row
    rows: int  # of a batch


@dataclass(frozen=True)
class Mixture:
    # shares of the rows
    text: float
    retrieval: float
    short: float
    # shares of the turns in a short row
    copy: float
    addition: float
    sort: float
    chat: float
    known: float
    copy_pool: int = len(ADJECTIVES + NOUNS)  # fewest words to draw a copy's from; few repeat often, which is harder


@dataclass(frozen=True)
class Phase:
    stages: tuple[Stage, ...]
    peak_lr: float
    mixture: Mixture

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError(f"step is beyond the phase's {self.steps}")


TEACH = Phase(
    stages=(Stage(8500, 512, 256), Stage(8000, 4096, 32)),
    peak_lr=4e-3,
    mixture=Mixture(text=0.6, retrieval=0.15, short=0.25, copy=0.15, addition=0.4, sort=0.15, chat=0.2, known=0.1),
)
POLISH = Phase(
    stages=(Stage(1800, 4096, 32),),
    peak_lr=1e-3,
    mixture=Mixture(
        text=0.5, retrieval=0.15, short=0.35, copy=0.5, addition=0.25, sort=0.1, chat=0.1, known=0.05, copy_pool=8
    ),
)


@dataclass(frozen=True)
class Recipe:
    phases: tuple[Phase, ...] = (TEACH, POLISH)
    seed: int = 1
    warmup_steps: int = 200
    final_lr: float = 0.02  # of the peak
    weight_decay: float = 0.05  # decoupled, times the learning rate
    mtp_weight: float = 0.3  # lambda of V3's equation 25
    bias_speed: float = 1e-3  # gamma of V3's section 4.2
    answer_weight: float = 2.0  # of an answer's token in the loss; a token of plain text counts 1, a question's 0

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def at(self, step: int) -> tuple[Phase, int]:
        """The phase of `step` and the step's number within it."""
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise IndexError(f"step is beyond the recipe's {self.steps}")

    def lr(self, step: int) -> float:
        phase, step = self.at(step)
        if step < self.warmup_steps:
            return phase.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, phase.steps - self.warmup_steps)
        return phase.peak_lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2)
