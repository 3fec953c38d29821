"""Training batches. Batch `step` is a function of (seed, step) alone, so a resumed run sees what it would have seen.

    python -m millrace_training.batches DATA_DIR TOKENIZER_DIR    ->    DATA_DIR/{train,heldout}.npz, from .jsonl

A row is of one kind, drawn by the phase's mixture: plain text, retrieval, or short chats. It is filled with documents
of that kind, each starting with the begin token. Weights mark what is learned: all of the text, the answers of chats.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch
from millrace_bench import tasks
from millrace_bench.tasks import Example, Turn
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from millrace_training.config import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID
from millrace_training.recipe import Mixture, Recipe
from millrace_training.small_talk import known_turn

LOOKAHEAD = 2  # the targets of the last position: the next token, and MTP's
TOKENS_PER_QUESTION = 16
MIN_LINES = 4
FULL_ROW = 0.4  # of the retrieval documents fill what is left of their row; the others are shorter, log-uniformly
MAX_QUESTIONS = 8
MAX_COPY_WORDS = 96
MAX_TURNS = 6
SYSTEM_SHARE = 0.1
SYSTEM_TEXTS = ("You are a helpful assistant.", "You are a small and friendly assistant.", "Answer briefly.")


class TextTokens:
    """All documents' tokens in one array, and where each begins."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.tokens: NDArray[np.uint16] = arrays["tokens"]
            self.starts: NDArray[np.int64] = arrays["starts"]

    @staticmethod
    def write(tokenizer: Tokenizer, documents: Path, path: Path) -> None:
        pieces, starts, size = [], [], 0
        with documents.open() as file:
            for line in file:
                ids = [BOS_ID, *tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids, EOS_ID]
                starts.append(size)
                size += len(ids)
                pieces.append(np.array(ids, np.uint16))
        np.savez_compressed(path, tokens=np.concatenate(pieces), starts=np.array(starts))

    def row(self, rng: Random, length: int) -> list[int]:
        """From the start of a document, or from anywhere after an inserted begin token."""
        last = len(self.tokens) - length
        if rng.random() < 0.5:
            start = int(self.starts[rng.randrange(len(self.starts))])
            return self.tokens[min(start, last) : min(start, last) + length].tolist()
        start = rng.randrange(last)
        return [BOS_ID, *self.tokens[start : start + length - 1].tolist()]


class ChatEncoder:
    """Turns -> (tokens, answer mask) in the shipped chat format."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids

    def __call__(self, turns: list[Turn] | tuple[Turn, ...], system: str = "") -> tuple[list[int], list[bool]]:
        tokens = [BOS_ID, *self._encode(system)]
        answers = [False] * len(tokens)
        for turn in turns:
            question = [USER_ID, *self._encode(turn.user), ASSISTANT_ID]
            answer = [*self._encode(turn.answer), EOS_ID]
            tokens += question + answer
            answers += [False] * len(question) + [True] * len(answer)
        return tokens, answers


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Item `step`: tokens [rows, length + 2] int32 and weights of the same shape, float32."""

    def __init__(self, recipe: Recipe, data_dir: Path, tokenizer_file: Path) -> None:
        self.recipe = recipe
        self.text = TextTokens(data_dir / "train.npz")
        self.chat = ChatEncoder(Tokenizer.from_file(str(tokenizer_file)))

    def __len__(self) -> int:
        return self.recipe.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        phase, step_in_phase = self.recipe.at(step)
        stage = phase.stage_at(step_in_phase)
        rng = Random(f"{self.recipe.seed}:{step}")
        rows = [self._row(rng, phase.mixture, stage.length + LOOKAHEAD) for _ in range(stage.rows)]
        tokens, weights = (np.array(part) for part in zip(*rows, strict=True))
        return torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(weights.astype(np.float32))

    def _row(self, rng: Random, mixture: Mixture, length: int) -> tuple[list[int], list[float]]:
        kind = rng.choices(("text", "retrieval", "short"), (mixture.text, mixture.retrieval, mixture.short))[0]
        if kind == "text":
            return self.text.row(rng, length), [1.0] * length
        tokens: list[int] = []
        answers: list[bool] = []
        while len(tokens) < length:
            room = length - len(tokens)
            more, mask = self._retrieval(rng, room) if kind == "retrieval" else self._session(rng, mixture)
            tokens += more
            answers += mask
        weights = [self.recipe.answer_weight * answer for answer in answers[:length]]
        return tokens[:length], weights

    def _retrieval(self, rng: Random, room: int) -> tuple[list[int], list[bool]]:
        questions = rng.randint(1, MAX_QUESTIONS)
        most = max(MIN_LINES, (room - TOKENS_PER_QUESTION * (questions + 1)) // tasks.TOKENS_PER_LINE)
        full = rng.random() < FULL_ROW
        lines = most if full else round(math.exp(rng.uniform(math.log(MIN_LINES), math.log(most))))
        return self.chat(unseen(rng, lambda: tasks.retrieval(rng, lines, questions)).turns)

    def _session(self, rng: Random, mixture: Mixture) -> tuple[list[int], list[bool]]:
        kinds = ("copy", "addition", "sort", "chat", "known")
        shares = [getattr(mixture, kind) for kind in kinds]
        turns: list[Turn] = []
        for _ in range(rng.randint(1, MAX_TURNS)):
            turns += _short(rng, rng.choices(kinds, shares)[0], mixture.copy_pool)
        return self.chat(turns, rng.choice(SYSTEM_TEXTS) if rng.random() < SYSTEM_SHARE else "")


def _short(rng: Random, kind: str, copy_pool: int) -> tuple[Turn, ...]:
    if kind == "known":
        return (known_turn(rng),)
    if kind == "copy":
        count = tasks.COPY_WORDS if rng.random() < 0.25 else rng.randint(1, MAX_COPY_WORDS)
        words = tasks.WORDS
        if copy_pool < len(words):
            words = rng.sample(words, rng.randint(copy_pool, len(words)))
        return unseen(rng, lambda: tasks.copying(rng, count, words)).turns
    if kind == "addition":
        low, high = (100, 999) if rng.random() < 0.8 else (0, 99)
        return unseen(rng, lambda: tasks.addition(rng, low, high)).turns
    return unseen(rng, lambda: (tasks.sorting if kind == "sort" else tasks.chat)(rng)).turns


def unseen(rng: Random, draw: Callable[[], Example]) -> Example:
    """The first draw that the evaluation never asks for."""
    example = draw()
    while tasks.is_held_out(example.key):
        example = draw()
    return example


def loader(batches: Batches, first_step: int, workers: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches from `first_step` on, in order, whatever the number of worker processes."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=range(first_step, len(batches)),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenize the plain text.")
    parser.add_argument("data", type=Path)
    parser.add_argument("tokenizer", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    for part in ("train", "heldout"):
        TextTokens.write(tokenizer, args.data / f"{part}.jsonl", args.data / f"{part}.npz")


if __name__ == "__main__":
    main()
