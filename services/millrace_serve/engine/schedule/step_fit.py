"""Fits StepTimes to the steps of a replica: least squares of the relative error, no number below 0.

Old steps fade, those with prompts only as new ones with prompts come, and likewise those without: what is known of
prompts lasts while none come. What no step has told stays as it was at the start. A step that took much longer than
expected counts for little, and one that took much less is cut: a late commit, and the step behind it.

A step of few sequences reads few experts, so each further sequence costs much, and among many it costs little. Such
steps hardly count: a replica that expected many sequences to be slow would be spared them, and never learn better.
"""

import dataclasses

import numpy as np
from millrace_common.step_times import StepTimes

from millrace_serve.engine.schedule.plan import Work

FADE = 0.998  # with every step of its kind
LEAST = 0.7  # of the expected time
FEW = 8  # steps of a kind, before which nothing is expected of it
EVERY = 16  # steps between two solutions, once there were so many
# Weights of the times at the start, in steps: more for what sequences and their keys cost.
PRIOR = np.diag([1e-3, 0.1, 0.1, 1e-3, 1e-3, 1e-3])
ROWS = 16  # sequences of a step without prompts, from which on it counts in full
SPARSE = 1e-5  # weight of a step with fewer: 500 of these tell less than one that counts in full
# Usual amounts, of a usual step: they make the columns of the equations alike. Those of prompts are small: where all
# chunks have one length, their time is taken for that of their tokens, and longer chunks are not expected for nothing.
SCALE = np.array([1.0, 64.0, 65536.0, 1.0, 32.0, 1048576.0])
USUAL_S = 0.02
NUMBERS = len(SCALE)


class StepFit:
    def __init__(self, start: StepTimes) -> None:
        self.times = start
        self._prior = self._solution = np.array(dataclasses.astuple(start)) * SCALE / USUAL_S
        # Of steps without prompts, and of those with them:
        self._squares, self._products = np.zeros((2, NUMBERS, NUMBERS)), np.zeros((2, NUMBERS))
        self._counts = [0, 0]

    def add(self, work: Work, seconds: float) -> None:
        """A step took `seconds`."""
        if seconds <= 0:
            return
        kind = int(work.tokens > 0)
        row = np.array([1.0, work.sequences, work.keys, kind, work.tokens, work.pairs]) / SCALE * USUAL_S
        expected = float(row @ self._solution) if self._counts[kind] >= FEW else 0.0
        unit = max(expected, seconds)
        row /= unit
        weight = 1.0 if kind or work.sequences >= ROWS else SPARSE
        self._squares[kind] = FADE * self._squares[kind] + weight * np.outer(row, row)
        self._products[kind] = FADE * self._products[kind] + weight * row * max(seconds / unit, LEAST)
        self._counts[kind] += 1
        if self._counts[kind] <= EVERY or sum(self._counts) % EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        squares = self._squares.sum(axis=0) + PRIOR
        products = self._products.sum(axis=0) + PRIOR @ self._prior
        kept = np.arange(NUMBERS)
        while True:  # one number that would be negative goes after the other
            found = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
            if found.min() >= 0:
                break
            kept = np.delete(kept, found.argmin())
        self._solution = np.zeros(NUMBERS)
        self._solution[kept] = found
        self.times = StepTimes(*(self._solution * USUAL_S / SCALE).tolist())
