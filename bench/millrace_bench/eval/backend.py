"""What the evaluation asks of a system, whatever it is: answers to items, and the perplexity where it has logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace_bench.tasks import Item


@dataclass(frozen=True, slots=True)
class Job:
    """An item and how to sample its answer."""

    item: Item
    temperature: float = 0.0  # 0: greedy
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    text: str = ""
    token_ids: tuple[int, ...] = ()  # empty where the interface does not tell them
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0  # that gave all tokens but the first; 0 where the system is not in this process
    error: str = ""  # why there is no answer; empty: there is one

    def same_as(self, other: "Answer") -> bool:
        """Token by token where both tell tokens, else by text. An answer that failed equals none."""
        if self.error or other.error:
            return False
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        return self.text == other.text


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of the held-out texts, each on its own after the beginning-of-sequence token."""

    value: float
    bits_per_byte: float
    tokens: int  # predicted ones


Done = Callable[[], None]  # called once for each answer


class Backend(Protocol):
    async def answer(self, jobs: Sequence[Job], done: Done) -> list[Answer]:
        """In the order of `jobs`. What goes wrong with one job is its answer's `error`."""

    async def perplexity(self) -> Perplexity | None:
        """None: the system does not show logits of a prompt."""
