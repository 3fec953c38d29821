"""The task suite: deterministic items with one right answer each, for evaluation and for the shipped model's training.

1. A task's `draw(rng)` makes one example: a conversation whose last turn is judged.
2. The example's key is its content without the phrasing. One key in sixteen is held out, by its hash: `items` draws
   only those, and training skips them, so no evaluated question was ever trained on, in any phrasing.
3. `judge` compares an output with the item's answer.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import NamedTuple

from millrace_bench.data import read_data

ADJECTIVES, NOUNS, NAMES, PETS = (text.split() for text in read_data("words.yaml").values())
# A line of the retrieval context, in the shipped tokenizer: `-`, two words, `:`, a space, three digits, newline.
TOKENS_PER_LINE = 9
RETRIEVAL_LINES = {"retrieval_1k": 110, "retrieval_2k": 224, "retrieval_4k": 445}
COPY_WORDS = 64
WORDS = ADJECTIVES + NOUNS
HELD_OUT_OF_256 = 16
MAX_MISSES = 5_000  # draws without a new item, after which a task counts as exhausted


class Message(NamedTuple):
    role: str
    content: str


class Turn(NamedTuple):
    user: str
    answer: str


class Example(NamedTuple):
    """A whole conversation with its answers."""

    key: str
    turns: tuple[Turn, ...]


class Match(Enum):
    EXACT = "exact"  # the whole output, but for surrounding space
    NUMBER = "number"  # the output's final number


class Verdict(Enum):
    CORRECT = "correct"
    WRONG = "wrong"
    INVALID = "invalid"  # nothing to judge: no text, or no number where one is asked for


@dataclass(frozen=True)
class Item:
    task: str
    key: str
    messages: tuple[Message, ...]  # ends with the user's question
    answer: str
    match: Match
    max_tokens: int  # enough for the right answer and its end token


@dataclass(frozen=True)
class Task:
    name: str
    draw: Callable[[Random], Example]
    match: Match = Match.EXACT
    max_tokens: int = 16

    def items(self, seed: int, count: int) -> list[Item]:
        """`count` different held-out items, the same for the same seed; a longer list starts with the shorter one.

        Raises:
            ValueError: the task has fewer than `count` held-out items.
        """
        items: dict[str, Item] = {}
        misses = 0
        rng = Random(f"evaluation:{self.name}:{seed}")
        while len(items) < count:
            example = self.draw(rng)
            if is_held_out(example.key) and example.key not in items:
                items[example.key] = self._item(example)
                misses = 0
            elif (misses := misses + 1) == MAX_MISSES:
                raise ValueError(f"{self.name}: count={count} exceeds its {len(items)} held-out items")
        return list(items.values())

    def _item(self, example: Example) -> Item:
        *before, last = example.turns
        messages = [
            Message(role, text) for turn in before for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        messages.append(Message("user", last.user))
        return Item(self.name, example.key, tuple(messages), last.answer, self.match, self.max_tokens)


def is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_OF_256


def retrieval(rng: Random, num_lines: int, num_questions: int = 1) -> Example:
    """`num_lines` lines `- adjective noun: three digits`, then questions for values; every key is there once."""
    keys = [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in _pairs(rng, num_lines)]
    values = [str(rng.randint(100, 999)) for _ in keys]
    lines = "".join(f"- {key}: {value}\n" for key, value in zip(keys, values, strict=True))
    asked = [rng.randrange(num_lines) for _ in range(num_questions)]
    turns = [Turn(f"What is the value of {keys[i]}?", values[i]) for i in asked]
    turns[0] = Turn(f"Remember these values:\n{lines}{turns[0].user}", turns[0].answer)
    return Example(f"retrieval:{lines}", tuple(turns))


def _pairs(rng: Random, count: int) -> list[int]:
    return rng.sample(range(len(ADJECTIVES) * len(NOUNS)), count)


def addition(rng: Random, low: int = 100, high: int = 999) -> Example:
    a, b = rng.randint(low, high), rng.randint(low, high)
    ask = rng.choice(("What is {} + {}?", "What is {} plus {}?", "Add {} and {}.", "{} + {} =", "{}+{}=")).format(a, b)
    return Example(f"addition:{min(a, b)}+{max(a, b)}", (Turn(ask, str(a + b)),))


def copying(rng: Random, num_words: int = COPY_WORDS, pool: Sequence[str] = WORDS) -> Example:
    words = " ".join(rng.choice(pool) for _ in range(num_words))
    return Example(f"copy:{words}", (Turn(f"Copy these words: {words}", words),))


def sorting(rng: Random, low: int = 4, high: int = 8) -> Example:
    numbers = [rng.randint(10, 99) for _ in range(rng.randint(low, high))]
    shown, ordered = (" ".join(map(str, values)) for values in (numbers, sorted(numbers)))
    return Example(f"sort:{shown}", (Turn(f"Sort these numbers: {shown}", ordered),))


def chat(rng: Random) -> Example:
    return rng.choice((_introduce, _remember))(rng)


def _introduce(rng: Random) -> Example:
    name, pet, kind = rng.choice(NAMES), rng.choice(NAMES), rng.choice(PETS)
    hello = Turn(
        rng.choice(("Hello, my name is {}.", "Hi! I am {}.", "My name is {}.")).format(name),
        f"Nice to meet you, {name}!",
    )
    companion = Turn(f"My {kind} is called {pet}.", f"{pet} is a nice name for a {kind}.")
    mine = Turn("What is my name?", f"Your name is {name}.")
    theirs = Turn(f"What is my {kind} called?", f"Your {kind} is called {pet}.")
    turns = rng.choice(
        ((hello,), (hello, mine), (hello, companion, mine), (hello, companion, theirs), (companion, theirs))
    )
    return Example(f"introduce:{name} {kind} {pet}" if companion in turns else f"introduce:{name}", turns)


def _remember(rng: Random) -> Example:
    thing = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    tell = Turn(f"I saw the {thing}.", f"The {thing}! That sounds nice.")
    turns = rng.choice(((tell,), (tell, Turn("What did I see?", f"You saw the {thing}."))))
    return Example(f"remember:{thing}", turns)


def _retrieval_task(name: str) -> Task:
    return Task(name, lambda rng: retrieval(rng, RETRIEVAL_LINES[name]), Match.NUMBER, max_tokens=8)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *map(_retrieval_task, RETRIEVAL_LINES),
        Task("addition", addition, Match.NUMBER, max_tokens=8),
        Task("copy", copying, max_tokens=2 * COPY_WORDS),
        Task("sort", sorting, max_tokens=32),
        Task("chat", chat, max_tokens=40),
    )
}


def judge(item: Item, output: str) -> Verdict:
    found = final_number(output) if item.match is Match.NUMBER else output.strip()
    if not found:
        return Verdict.INVALID
    wanted = final_number(item.answer) if item.match is Match.NUMBER else item.answer
    return Verdict.CORRECT if found == wanted else Verdict.WRONG


def final_number(text: str) -> str | None:
    """The number after the last `####`, or the last number of all, without thousands separators and trailing zeros.

    >>> final_number("so 3 x 1,200 is $3,600.00.")
    '3600'
    """
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2])
    if not numbers:
        return None
    whole, _, fraction = numbers[-1].replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def wilson_interval(correct: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); z = 1.96 for 95 %. (0, 1) without observations."""
    if total == 0:
        return 0.0, 1.0
    p, scale = correct / total, 1 + z * z / total
    centre = p + z * z / (2 * total)
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
