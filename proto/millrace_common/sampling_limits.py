"""Limits of a request that depend neither on the model nor on a configuration. Router and worker both check them."""

from typing import NamedTuple

U32, U64 = 2**32 - 1, 2**64 - 1
NOTHING = 2.0**-150  # messages have numbers of 32 bits, in which this and less is 0


class Range(NamedTuple):
    low: float
    high: float
    above: bool = False  # low itself is not allowed

    def __str__(self) -> str:
        return f"above {self.low} and at most {self.high}" if self.above else f"between {self.low} and {self.high}"

    def holds(self, value: float) -> bool:
        """NaN is in no range. Integers may have any number of digits."""
        return (self.low + NOTHING < value if self.above else self.low <= value) and value <= self.high


NUMBERS = {  # the scalar fields of common.proto's SamplingParams
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0, U32),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(0, U64),
    "max_tokens": Range(1, U32),
    "min_tokens": Range(0, U32),
    "logprobs": Range(0, 20),
}
LOGIT_BIAS = Range(-100, 100)  # of one token
PRIORITY = Range(-100, 100)  # higher goes first
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKEN_IDS = 64
MAX_MARKS, MAX_MARK_CHARS = 8, 64  # of a grammar
