"""How long a step of one replica takes, as the replica has measured it. Routers, workers and `millrace plan` predict
with the same sum:

    seconds = fixed + sequences x sequence + keys x key                decode sequences
                    + chunk + tokens x token + pairs x pair            where the step has prompt tokens

A step reads the weights once, whatever is in it: that is in `fixed_s`, so a prompt's chunk beside decode rows pays it
only once. A pair is a prompt's token and one before it. The keys and values of a prompt's computed tokens are expanded
anew for each chunk, or a short chunk attends to them unexpanded (model/attn_step.py). `chunk_pairs` counts either.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RECOVER = 128  # tokens of a stream that make up for longer steps, and as many before them
LOSS = 0.1  # of its speed, that a long prompt gives up for short steps: a prompt that comes waits for the end of one
SAVED = 16  # tokens of a stream, whose time a prompt's chunk waits for at most
SOON = 8  # steps: a prompt that takes no more gives up nothing of its speed
KEPT = 0.25  # of a step's prompt tokens, for the prompt that came first
MANY = 1 << 30  # tokens, for no limit
EXPAND = 500  # pairs that the keys and values of a computed token cost
ABSORB = 2.7  # pairs that a pair costs whose key is not expanded
AIM = 0.95  # of a TPOT limit: predicted times have an error, keys grow, and a hand-over adds to a stream's mean


def chunk_pairs(start: float, tokens: float) -> float:
    """That a chunk of `tokens` costs, `start` tokens behind the beginning of its prompt."""
    return tokens * tokens / 2 + start * min(tokens + EXPAND, ABSORB * tokens)


def prompt_pairs(start: float, tokens: float, chunk: float) -> float:
    """That the tokens from `start` on of a prompt cost in steps of `chunk` prompt tokens."""
    chunk = min(max(chunk, 1), tokens)
    return tokens / chunk * chunk_pairs(start + (tokens - chunk) / 2, chunk) if tokens else 0.0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. The default, all 0, means that nothing has been measured."""

    fixed_s: float = 0.0
    sequence_s: float = 0.0  # of each sequence that decodes
    key_s: float = 0.0  # of each cached token of these sequences
    chunk_s: float = 0.0  # of a step with prompt tokens, besides: their attention is launched kernel by kernel
    token_s: float = 0.0  # of each prompt token
    pair_s: float = 0.0  # of each pair of `chunk_pairs`

    @property
    def known(self) -> bool:
        return self.fixed_s > 0 or self.token_s > 0

    def step_s(self, sequences: float = 0, keys: float = 0, tokens: float = 0, pairs: float = 0) -> float:
        """Seconds of a step with so many decode sequences, their cached tokens, prompt tokens, and pairs of these."""
        seconds = self.fixed_s + self.sequence_s * sequences + self.key_s * keys
        return seconds + self.chunk_s + self.token_s * tokens + self.pair_s * pairs if tokens else seconds

    def fits(self, left: float, start: int) -> int:
        """Prompt tokens, `start` tokens behind the beginning of their prompt, that make a step longer by no more than
        `left` seconds, besides `chunk_s`; MANY where they cost nothing.
        """
        found = 0.0
        for left_s, before in ((left, ABSORB * start), (left - self.pair_s * EXPAND * start, start)):
            each = self.token_s + self.pair_s * before
            if left_s > 0:
                # tokens x each + pair x tokens^2 / 2 = left, solved in a form that needs no pair
                twice = math.sqrt(each * each + 2 * self.pair_s * left_s) + each
                found = max(found, 2 * left_s / twice if twice else MANY)
        return int(min(found, MANY))

    def beside(
        self, limit_s: float, spare_s: float, sequences: float, keys: float, start: int, wanted: int, least: int
    ) -> tuple[int, float]:
        """Prompt tokens of a step beside decode sequences with a TPOT limit, the first ones `start` tokens behind the
        beginning of their prompt, and the seconds for all; `wanted`: tokens of all prompts. MANY and inf where there is
        no limit, or the times are unknown.

        The limit is one of means. A chunk so short that no step exceeds it would mostly pay for `chunk_s`. So a step
        may be longer by `spare_s`: what each stream is ahead of AIM of its limit, and will save in RECOVER tokens that
        come. Until that is worth what a chunk pays anew, steps without prompts save time, and the result is 0. No chunk
        waits for more than SAVED tokens save. Where these save less than `least` tokens take, steps have these all the
        same: prompts must go on.
        """
        if math.isinf(limit_s) or not self.token_s:
            return MANY, math.inf
        seconds, saved_s = spare_s - self.chunk_s, SAVED * (AIM * limit_s - self.step_s(sequences, keys))
        saved = self.fits(saved_s - self.chunk_s, start)
        if saved < least:
            return least, math.inf
        within = self.fits(seconds, start)
        return within if within >= min(self.fewest(self.chunk_s, start, wanted), saved) else 0, seconds

    def prompts_s(self, tokens: float, pairs: float = 0) -> float:
        """By how much so many prompt tokens make a step longer."""
        return self.step_s(tokens=tokens, pairs=pairs) - self.fixed_s

    def prompt_s(self, tokens: int, start: int = 0, chunk: int = 1 << 30) -> float:
        """Seconds until the tokens from `start` on of a prompt of `start + tokens` are computed, in steps of at most
        `chunk` prompt tokens.
        """
        steps = max(-(-tokens // max(chunk, 1)), 1)
        pairs_s = self.pair_s * prompt_pairs(start, tokens, chunk)
        return steps * (self.fixed_s + self.chunk_s) + self.token_s * tokens + pairs_s

    def chunk_alone(self, start: int, most: int) -> int:
        """The fewest tokens of a step, `start` tokens behind the beginning of their prompt, with which the prompt loses
        no more than LOSS against steps of `most` tokens. `most` while the times are unknown.
        """
        return (self.fewest(self.fixed_s + self.chunk_s, start, most) if self.token_s else 0) or most

    def fewest(self, step_s: float, start: int, most: int) -> int:
        """Tokens with which a prompt loses no more than LOSS by paying `step_s` and its computed tokens' keys in each
        step, against steps of `most` tokens.
        """
        if not most or not (step_s or self.pair_s * start):
            return 0
        behind_s = self.pair_s * start
        lost_s = (1 + LOSS) * (step_s / most + self.token_s + behind_s * min(1 + EXPAND / most, ABSORB)) - self.token_s
        absorbed, expanded = lost_s - ABSORB * behind_s, lost_s - behind_s
        few = step_s / absorbed if absorbed > 0 else most
        more = (step_s + behind_s * EXPAND) / expanded if expanded > 0 else most  # the tiniest times round to none
        return math.ceil(min(few, more, most))

    def divide(self, prompts: Sequence[tuple[int, int]], left: int, most: int, left_s: float = math.inf) -> list[int]:
        """Tokens of the next step, `left` in `left_s` seconds in all and `most` in one without limits, for each of
        `prompts`: computed tokens and the rest, in the order in which they came.

        The least rest comes first, so that a prompt of 500 tokens does not wait for one of 100,000. The prompt that
        came first has KEPT of the tokens and seconds. If it does not end, it takes as long as all else in the step, and
        prompts with a longer rest wait until it ends.
        """
        shares, before_s, limited = [0] * len(prompts), 0.0, left_s < math.inf
        kept, kept_s = min(prompts[0][1], int(left * KEPT)) if prompts else 0, left_s * KEPT if limited else 0.0
        for index in sorted(range(len(prompts)), key=lambda index: prompts[index][1]):
            start, rest = prompts[index]
            if not index:
                kept, kept_s = 0, 0.0
            whole = most if start + rest <= SOON * most else self.chunk_alone(start, most)
            tokens, seconds = min(rest, whole, left - kept), left_s - kept_s
            if not index and before_s and rest > most // 2:
                seconds = min(seconds, self.fixed_s + self.chunk_s + before_s)
            if seconds < math.inf:
                tokens = min(tokens, max(self.fits(seconds, start), 0 if limited else 1))
            shares[index] = tokens
            took_s = self.token_s * tokens + self.pair_s * chunk_pairs(start, tokens)
            left, left_s, before_s = left - tokens, left_s - took_s, before_s + took_s
            if not index and tokens < rest:
                break
        return shares


def tokens_left(rests: Iterable[int], tokens: int, most: int) -> int:
    """Of a step's `tokens` for newcomers, beside prompts with these rests. A rest of more than half of `most` tokens,
    the step's without limits, lasts for more than the next step.
    """
    every = list(rests)
    ends = [rest for rest in every if rest <= most // 2]
    return tokens - sum(ends) - (int(tokens * KEPT) if len(ends) < len(every) else 0)
