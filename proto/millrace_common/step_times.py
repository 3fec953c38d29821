"""How long a step of one replica takes, as the replica has measured it. Routers, workers and `millrace plan` predict
with the same sum:

    seconds = fixed + sequences x sequence + keys x key                decode sequences
                    + chunk + tokens x token + pairs x pair            where the step has prompt tokens

A step reads the weights once, whatever is in it: that is in `fixed_s`, so a prompt's chunk beside decode rows pays it
only once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AIM = 0.95  # of a TPOT limit: predicted times have an error, keys grow, and a hand-over adds to a stream's mean


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. The default, all 0, means that nothing has been measured."""

    fixed_s: float = 0.0
    sequence_s: float = 0.0  # of each sequence that decodes
    key_s: float = 0.0  # of each cached token of these sequences
    chunk_s: float = 0.0  # of a step with prompt tokens, besides: their attention is launched kernel by kernel
    token_s: float = 0.0  # of each prompt token
    pair_s: float = 0.0  # of each prompt token and token before it in its prompt

    @property
    def known(self) -> bool:
        return self.fixed_s > 0 or self.token_s > 0

    def step_s(self, sequences: float = 0, keys: float = 0, tokens: float = 0, pairs: float = 0) -> float:
        """Seconds of a step with so many decode sequences, their cached tokens, prompt tokens, and pairs of these."""
        seconds = self.fixed_s + self.sequence_s * sequences + self.key_s * keys
        return seconds + self.chunk_s + self.token_s * tokens + self.pair_s * pairs if tokens else seconds

    def tokens_within(self, limit_s: float, sequences: float, keys: float, start: int = 0) -> int:
        """Prompt tokens, `start` tokens behind the beginning of their prompt, that fit into a step of `limit_s` beside
        the decode sequences; 0: the step is too long without any.
        """
        left = limit_s - self.step_s(sequences, keys) - self.chunk_s
        each = self.token_s + self.pair_s * start
        if left <= 0 or each <= 0:
            return 0
        # tokens x each + pair x tokens^2 / 2 = left
        if not self.pair_s:
            return int(left / each)
        return int((math.sqrt(each * each + 2 * self.pair_s * left) - each) / self.pair_s)

    def chunk_beside(self, limit_s: float, sequences: float, keys: float, start: int, least: int, most: int) -> int:
        """Prompt tokens of a step beside decode sequences with a TPOT limit, `start` tokens behind the beginning of
        their prompt: what AIM of the limit leaves, but `least` in any case, because prompts must go on. `most` where
        there is no limit, or the times are unknown.
        """
        if math.isinf(limit_s) or not self.token_s:
            return most
        return min(max(self.tokens_within(AIM * limit_s, sequences, keys, start), least), most)

    def prompt_s(self, tokens: int, start: int = 0, chunk: int = 1 << 30) -> float:
        """Seconds until the tokens from `start` on of a prompt of `start + tokens` are computed, in steps of at most
        `chunk` prompt tokens.
        """
        steps = max(-(-tokens // max(chunk, 1)), 1)
        pairs = tokens * (start + tokens / 2)
        return steps * (self.fixed_s + self.chunk_s) + self.token_s * tokens + self.pair_s * pairs
