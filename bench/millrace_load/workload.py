"""What a load run sends, and when: conversations of one or more turns, all drawn from one seed. traces.py has recorded
ones.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")

Prompt = list[int] | str  # token ids, or text


class WorkloadError(ValueError):
    """A trace that cannot be read, or requests that the model cannot take. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of lengths or of seconds: "128", "64:256" (uniform, both ends included), "lognormal:128:0.5" (median, sigma)."""

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def lengths(cls, text: str) -> "Distribution":
        """Of whole numbers from 1 on. ValueError with the accepted forms."""
        return cls._parse("length", text, int, 1)

    @classmethod
    def times(cls, text: str) -> "Distribution":
        """Of seconds from 0 on. ValueError with the accepted forms."""
        return cls._parse("time", text, float, 0)

    @classmethod
    def _parse(cls, what: str, text: str, number: Callable[[str], float], least: int) -> "Distribution":
        try:
            match text.split(":"):
                case [a]:
                    found = cls("fixed", number(a))
                case [a, b]:
                    found = cls("uniform", number(a), number(b))
                case ["lognormal", median, sigma]:
                    found = cls("lognormal", float(median), float(sigma))
                case _:
                    raise ValueError(text)
        except ValueError:
            raise ValueError(f"{what} {text!r} is none of N, LOW:HIGH, lognormal:MEDIAN:SIGMA") from None
        ordered = found.kind != "uniform" or found.a <= found.b
        if not (math.isfinite(found.a + found.b) and found.a >= least and found.b >= 0 and ordered):
            raise ValueError(f"{what} {text!r}: {what}s start at {least}, and a range does not descend")
        if found.kind == "lognormal" and found.a == 0:
            raise ValueError(f"{what} {text!r}: a median must be above 0")
        return found

    def length(self, rng: Random) -> int:
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        return max(round(self.seconds(rng)), 1)

    def seconds(self, rng: Random) -> float:
        if self.kind == "uniform":
            return rng.uniform(self.a, self.b)
        return rng.lognormvariate(math.log(self.a), self.b) if self.kind == "lognormal" else self.a


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """That fraction of the conversations begins with the same `length` tokens. "0.5:256"; "0:0" for none."""

    fraction: float
    length: int

    @classmethod
    def parse(cls, text: str) -> "SharedPrefix":
        fraction, _, length = text.partition(":")
        try:
            prefix = cls(float(fraction), int(length))
        except ValueError:
            raise ValueError(f"shared prefix {text!r} is not FRACTION:LENGTH") from None
        if not 0 <= prefix.fraction <= 1 or prefix.length < 0:
            raise ValueError(f"shared prefix {text!r}: the fraction is 0 to 1 and the length not negative")
        return prefix


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Its prompt is all that was said before, answers included, and `said`."""

    said: Prompt
    max_tokens: int
    seed: int
    think_s: float = 0.0  # between the end of the answer before it and this request
    branches: "tuple[Branch, ...]" = ()  # that begin with the end of its answer


@dataclass(frozen=True, slots=True)
class Branch:
    """A sub-agent's conversation, at the same time as the rest of the conversation that begins it."""

    conversation: "Conversation"
    inherits: bool = False  # its prompts begin with all that was said before
    join_at: int | None = None  # the turn of the other conversation that waits for it; None: none does


@dataclass(frozen=True, slots=True)
class Conversation:
    index: int  # that of the conversation which began it, if it is a branch
    turns: tuple[Turn, ...]
    start_s: float | None = None  # from the start of the run; None: when a client is free
    branches: tuple[Branch, ...] = ()  # that begin with it

    @property
    def num_requests(self) -> int:
        """With those of its branches."""
        branches = (*self.branches, *(branch for turn in self.turns for branch in turn.branches))
        return len(self.turns) + sum(branch.conversation.num_requests for branch in branches)


@dataclass(frozen=True, slots=True)
class Plan:
    """Either all conversations have a start, in ascending order, or none has one."""

    conversations: tuple[Conversation, ...]
    left_out: int = 0  # requests that the model's context cannot hold

    @property
    def num_requests(self) -> int:
        return sum(conversation.num_requests for conversation in self.conversations)

    def arriving(self, rate: float, seed: int) -> "Plan":
        """The same conversations, with Poisson arrivals."""
        pairs = zip(self.conversations, poisson_arrivals(rate, seed), strict=False)
        return replace(self, conversations=tuple(replace(item, start_s=start_s) for item, start_s in pairs))


@dataclass(frozen=True, slots=True)
class Workload:
    """Random conversations. Texts have about as many tokens as was asked for."""

    turns: int  # of each conversation
    input_len: Distribution  # of a turn, without what was said before
    output_len: Distribution  # of a turn
    think: Distribution
    prefix: SharedPrefix
    vocab_size: int  # 0: prompts are text
    max_context: int
    seed: int

    def plan(self, count: int) -> Plan:
        """That many conversations. WorkloadError when the shared prefix fills the context."""
        if self.prefix.length > self.max_context - 2:
            limit = f"the model's context of {self.max_context} has room for {self.max_context - 2}"
            raise WorkloadError(f"shared prefix of {self.prefix.length} tokens: {limit}")
        rng = Random(self.seed)
        words = vocabulary(self.vocab_size)
        shared = rng.choices(words, k=self.prefix.length)
        items = tuple(self._conversation(rng, index, words, shared) for index in range(count))
        return Plan(items, count * self.turns - sum(len(item.turns) for item in items))

    def _conversation(self, rng: Random, index: int, words: list, shared: list) -> Conversation:
        """The first turn is cut to the context; the conversation ends before a later one that does not fit."""
        before = shared if rng.random() < self.prefix.fraction else []
        room = self.max_context - len(before)
        turns: list[Turn] = []
        for _ in range(self.turns):
            output_len, input_len = self.output_len.length(rng), self.input_len.length(rng)
            if not turns:
                output_len = min(output_len, room - 1)
                input_len = min(input_len, room - output_len)
            room -= input_len + output_len
            if room < 0:
                break
            said = prompt([*before, *rng.choices(words, k=input_len)], later=bool(turns))
            think_s = self.think.seconds(rng) if turns else 0.0
            turns.append(Turn(said, output_len, rng.getrandbits(63), think_s))
            before = []
        return Conversation(index, tuple(turns))


def vocabulary(size: int) -> list:
    """Token ids; with size 0 words."""
    return list(range(size)) or list(WORDS)


def prompt(parts: list, later: bool = False) -> Prompt:
    """Of token ids or words. Text that is `later` in a conversation begins with a space."""
    if parts and isinstance(parts[0], str):
        return " " * later + " ".join(parts)
    return parts


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive: exponential gaps with mean 1/rate."""
    rng, now = Random(seed), 0.0
    while True:
        yield now
        now += rng.expovariate(rate)
