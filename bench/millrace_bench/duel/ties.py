"""Near-ties and wrong tokens of greedy answers, told apart by what the undisturbed server says.

Sums round differently in other batches. So two undisturbed answers part where two words are almost equally likely, and
have nothing in common behind it. `walk` therefore goes along one answer: wherever it has another word than the server
says behind the same text, it notes by how much its word is less likely than the best, and goes on behind that word.
The margin of a near-tie is measured in the same way, where undisturbed answers part, and by `recompute`: a fault makes
servers compute as a prompt what was an answer, which also rounds differently.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WORD = re.compile(r" [a-z]{4}")
ASKS = 64  # requests for one answer at most
STRETCH = 64  # words of a request at most: what is behind the next near-tie is asked for again
TOP = 20  # words that are listed with their logprobs
PLACES = 8  # of an answer that is computed again
SLACK = 1.5  # margin by the largest difference that was measured: faults have many more places
TOO_WIDE = 0.5  # share of places where the margin holds all words that are listed


@dataclass(frozen=True, slots=True)
class Step:
    """The next word that a server says, and by how many nats each of the likeliest ones is behind the best."""

    word: str
    behind: Mapping[str, float]


Ask = Callable[[str, int], Awaitable[Sequence[Step]]]  # a text -> the next words, at most so many; none: it failed


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer has another word than the server says, or was computed again."""

    behind: float | None  # of its word, None: not listed; or how much `behind` of a word has changed
    listed: tuple[float, ...] = ()  # `behind` of the words that are listed, ascending

    def verdict(self, margin: float) -> Literal["near-tie", "wrong", "untold"]:
        if self.behind is not None:
            return "near-tie" if self.behind <= margin else "wrong"
        return "untold" if self.listed and self.listed[-1] <= margin else "wrong"


@dataclass(frozen=True, slots=True)
class Walk:
    places: tuple[Place, ...]
    ended: bool  # at the end of the answer, not of what may be asked


@dataclass(frozen=True, slots=True)
class Judged:
    """Of greedy answers that differ from their control: each is wrong, not judged to its end, or has near-ties only."""

    places: int = 0
    near_ties: int = 0
    wrong_tokens: int = 0
    wrong: int = 0  # answers
    not_judged: int = 0  # answers in which no wrong token was found

    @classmethod
    def of(cls, walks: Sequence[Walk], margin: float) -> Judged:
        found = [Counter(place.verdict(margin) for place in walk.places) for walk in walks]
        total = sum(found, Counter())
        open_ones = [not walk.ended or one["untold"] > 0 for walk, one in zip(walks, found, strict=True)]
        wrong = [one["wrong"] > 0 for one in found]
        not_judged = sum(left and not bad for left, bad in zip(open_ones, wrong, strict=True))
        return cls(total.total(), total["near-tie"], total["wrong"], sum(wrong), not_judged)


@dataclass(frozen=True, slots=True)
class Margin:
    """In nats, from where undisturbed answers part, and where they were computed again."""

    largest: float  # difference there, of words that are listed
    nats: float  # that a word of a near-tie may be behind the best
    words_within: float  # at such a place, on average
    share: float  # of the vocabulary, which is the chance that a random word is taken for a near-tie
    too_wide: bool  # the lists are too short: words outside of them cannot be told

    @classmethod
    def of(cls, walks: Sequence[Walk], vocabulary: int) -> Margin:
        places = [place for walk in walks for place in walk.places if place.listed]
        largest = max((place.behind for place in places if place.behind is not None), default=0.0)
        nats = SLACK * largest
        within = [sum(behind <= nats for behind in place.listed) for place in places]
        full = sum(place.listed[-1] <= nats for place in places)
        mean = sum(within) / len(places) if places else 1.0
        return cls(largest, nats, mean, mean / vocabulary, full > TOO_WIDE * len(places))


def words(text: str) -> list[str]:
    """Of the tokenizer; other characters are words of their own, which no server says here."""
    return re.findall(rf"{WORD.pattern}|.", text, re.DOTALL)


def steps(logprobs: Mapping[str, Any]) -> list[Step]:
    """Of the `logprobs` of a completion. What is no word was kept from the answer, however likely it is."""
    found = []
    fields = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for word, own, top in zip(*fields, strict=True):
        listed = {name: value for name, value in (top or {}).items() if WORD.fullmatch(name)} | {word: own}
        best = max(listed.values())
        found.append(Step(word, {name: best - value for name, value in listed.items()}))
    return found


async def walk(ask: Ask, prompt: str, control: Sequence[str], answer: Sequence[str], whole: bool) -> Walk:
    """Along the words of an answer, from the first on that is not the control's. `whole`: it claims to be, so it has as
    many words. There the control's word is held against the server as well: a server that has changed is noticed.
    """
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(control, answer, strict=False))
    first = at = len(list(same))
    places = [Place(None)] if whole and len(answer) != len(control) else []
    for _ in range(ASKS):
        if at >= len(answer):
            break
        said = await ask(prompt + "".join(answer[:at]), min(STRETCH, len(answer) - at))
        for step, word in zip(said, answer[at:], strict=False):
            here = {word, *(control[at : at + 1] if at == first else ())}
            at += 1
            if here != {step.word}:
                places.append(_place(step, here))
                break
        if not said:
            break
    return Walk(tuple(places), at >= len(answer))


async def recompute(ask: Ask, again: Ask, prompt: str, length: int) -> Walk:
    """An answer of so many words, and places of it where `again` computes what was said so far as a prompt."""
    said, places = await ask(prompt, length), []
    for at in range(0, len(said), max(len(said) // PLACES, 1)):
        for step in await again(prompt + "".join(one.word for one in said[:at]), 1):
            both = step.behind.keys() & said[at].behind.keys()
            changed = max((abs(step.behind[word] - said[at].behind[word]) for word in both), default=None)
            places.append(Place(changed, tuple(sorted(step.behind.values()))))
    return Walk(tuple(places), ended=True)


def _place(step: Step, here: set[str]) -> Place:
    """`behind` of the least likely of these words."""
    known = [step.behind[word] for word in here if word in step.behind]
    return Place(max(known) if len(known) == len(here) else None, tuple(sorted(step.behind.values())))
