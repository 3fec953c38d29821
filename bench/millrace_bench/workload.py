"""What a load run sends, and when: lengths, prompts and arrival times, all drawn from one seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths of at least 1: "128", "64:256" (uniform, both ends included), "lognormal:128:0.5"
    (median, sigma).
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ValueError with the accepted forms."""
        parts = text.split(":")
        try:
            if len(parts) == 1:
                lengths = cls("fixed", int(text))
            elif len(parts) == 2:
                lengths = cls("uniform", int(parts[0]), int(parts[1]))
            else:
                kind, median, sigma = parts
                lengths = cls(kind, float(median), float(sigma))
        except ValueError:
            raise ValueError(f"length {text!r} is none of N, LOW:HIGH, lognormal:MEDIAN:SIGMA") from None
        if lengths.kind not in ("fixed", "uniform", "lognormal"):
            raise ValueError(f"length {text!r} is none of N, LOW:HIGH, lognormal:MEDIAN:SIGMA")
        if lengths.a < 1 or (lengths.kind == "uniform" and lengths.b < lengths.a) or lengths.b < 0:
            raise ValueError(f"length {text!r}: lengths start at 1, and a range does not descend")
        return lengths

    def draw(self, rng: Random, limit: int) -> int:
        """A length in 1 … limit."""
        if self.kind == "uniform":
            length = rng.randint(int(self.a), int(self.b))
        elif self.kind == "lognormal":
            length = round(rng.lognormvariate(math.log(self.a), self.b))
        else:
            length = int(self.a)
        return min(max(length, 1), limit)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """That fraction of the prompts begins with the same `length` tokens. "0.5:256"; "0:0" for none."""

    fraction: float
    length: int

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        fraction, _, length = text.partition(":")
        try:
            prefix = cls(float(fraction), int(length))
        except ValueError:
            raise ValueError(f"shared prefix {text!r} is not FRACTION:LENGTH") from None
        if not 0 <= prefix.fraction <= 1 or prefix.length < 0:
            raise ValueError(f"shared prefix {text!r}: the fraction is 0 to 1 and the length not negative")
        return prefix


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `prompt` is token ids, or text of about as many tokens."""

    index: int
    prompt: list[int] | str
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    input_len: Lengths
    output_len: Lengths
    prefix: SharedPrefix
    vocab_size: int  # 0: prompts are text
    max_context: int
    seed: int

    def jobs(self, count: int) -> list[Job]:
        rng = Random(self.seed)
        shared = self._units(rng, min(self.prefix.length, self.max_context - 1))
        jobs = []
        for index in range(count):
            output_len = self.output_len.draw(rng, self.max_context - 1)
            input_len = self.input_len.draw(rng, self.max_context - output_len)
            units = self._units(rng, input_len)
            if rng.random() < self.prefix.fraction:
                units[: len(shared)] = shared[:input_len]
            prompt = units if self.vocab_size else " ".join(map(str, units))
            jobs.append(Job(index, prompt, output_len, rng.getrandbits(63)))
        return jobs

    def _units(self, rng: Random, count: int) -> list:
        if self.vocab_size:
            return [rng.randrange(self.vocab_size) for _ in range(count)]
        return rng.choices(WORDS, k=count)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: exponential gaps with mean 1/rate."""
    rng, now = Random(seed), 0.0
    while True:
        yield now
        now += rng.expovariate(rate)
