"""Whether words of an answer can be what a server says behind its prompt: evidence that does not depend on the batch.

A word is `outside` by as many nats as it is less likely than the last one that the options of its request allow: the
best word of greedy answers and of those with a schema, the K-th best one where top_k is K. Sums round differently in
other batches, so words of undisturbed answers are outside too. `Usual` is how far, at many places. Words behind a wrong
prompt are outside further, or more often.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WORD = re.compile(r" [a-z]{4}")
TOP = 20  # words that are listed with their logprobs
BIAS = 100.0  # logit_bias of the word that is asked for: every server then says it, and tells its logprob
PROOF = 17.0  # nats: by chance once in 24 million places, so for three tilts in 8 million
FLOOR = 0.01  # nats: float32 rounds by 1e-5, and a word that is so near is as good as the best
SLACK = 3.0  # words as far outside as any undisturbed one are a proof if they are more: rare ones may not be measured
TILTS = (1.0, 1 / 4, 1 / 16)  # from a few words far outside to many that are outside a little


def words(text: str) -> list[str]:
    """Of the tokenizer; other characters are tokens of their own."""
    return re.findall(rf"{WORD.pattern}|.", text, re.DOTALL)


def outside(logprobs: Mapping[str, Any], word: str, allowed: int) -> float | None:
    """Of a word that BIAS makes the answer, by the `logprobs` of this completion. None: the answer is another one.

    Millrace lists logprobs without the bias, SGLang with it. What is no word is not counted: a bias keeps it away.
    """
    (said,), (own,), (top,) = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    others = sorted((value for name, value in top.items() if WORD.fullmatch(name) and name != word), reverse=True)
    if said != word or not others:
        return None
    own -= BIAS if own - others[0] > BIAS / 2 else 0.0
    return float(max(0.0, others[min(allowed, len(others)) - 1] - own))


@dataclass(frozen=True, slots=True)
class Usual:
    """How far words of undisturbed answers are outside."""

    places: int
    largest: float
    tilts: tuple[tuple[float, float], ...]  # factor of a word's nats, and what is taken off

    @classmethod
    def of(cls, found: Sequence[float], least: float = 0.0) -> "Usual":
        largest = max(least, *found, 0.0)  # `least`: of other kinds, which have the same noise
        factors = [tilt * PROOF / (SLACK * largest + FLOOR) for tilt in TILTS]
        taken = [math.log(fmean(math.exp(factor * one) for one in found or [0.0])) for factor in factors]
        return cls(len(found), largest, tuple(zip(factors, taken, strict=True)))

    def evidence(self, found: Sequence[float]) -> float:
        """That some neighbours of these words are not those of an undisturbed answer, in nats: the largest sum.

        A word adds `factor * outside - taken`, where it is no further outside than any undisturbed one was. Behind
        undisturbed words the exponential of a sum is 1 on average, so from any place on it reaches exp(PROOF) with a
        chance of exp(-PROOF) at most (Ville's inequality).
        """
        most = 0.0
        for factor, taken in self.tilts:
            steps = (factor * min(one, self.largest + 2 * FLOOR) - taken for one in found)
            most = max(most, *itertools.accumulate(steps, lambda total, step: max(0.0, total) + step, initial=0.0))
        return most


@dataclass(frozen=True, slots=True)
class Judged:
    """Of answers that differ from their control."""

    places: int = 0  # words that were judged
    wrong: int = 0  # answers
    not_judged: int = 0  # to their end, and not found wrong
    most: float = 0.0  # evidence against an answer that is not wrong

    def __add__(self, other: "Judged") -> "Judged":
        wrong, not_judged = self.wrong + other.wrong, self.not_judged + other.not_judged
        return Judged(self.places + other.places, wrong, not_judged, max(self.most, other.most))

    @classmethod
    def of(cls, usual: Usual, answers: Sequence[Sequence[float | None]], *, bad: bool) -> "Judged":
        """Of one answer: what is found outside at its places and its control's; None: nobody could ask. `bad`: it is
        wrong whatever is found.
        """
        known = [[one for one in found if one is not None] for found in answers]
        most = max(map(usual.evidence, known), default=0.0)
        wrong = bad or most >= PROOF
        ended = any(answers) and not any(None in found for found in answers)
        return cls(sum(map(len, known)), int(wrong), int(not wrong and not ended), 0.0 if wrong else most)
