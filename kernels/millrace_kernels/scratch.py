"""Counters that are zero when a kernel gets them; one fill per step zeroes those of all layers.

A kernel that counts with atomics begins with zeros. Filling them layer by layer is one more launch per layer, so a step
zeroes one block when it begins and every layer takes its own part of it:

    with scratch.step():                       the model, around a forward
        counts = zeros(num_experts, device)    a kernel's host code

Each word is given out once per step, so it is zero. When the block is used up, and outside a step, words
come from torch. The block stays where it is: a graph that captured a whole step zeroes it again in every replay.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

WORDS = 1 << 16  # 256 KiB: a thousand per layer of a model of 61
ALIGN = 32  # words; a cache line, so that atomics of neighbours do not meet

_active = threading.local()  # .scratch of the thread that launches


class Scratch:
    """The counters of one model."""

    def __init__(self, device: torch.device, words: int = WORDS) -> None:
        self._memory = torch.zeros(words, dtype=torch.int32, device=device)
        self._used = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Zeroes all words on the current stream; kernels that this thread launches inside take theirs from here."""
        self._memory.zero_()
        self._used = 0
        outer, _active.scratch = getattr(_active, "scratch", None), self
        try:
            yield
        finally:
            _active.scratch = outer

    def take(self, words: int, device: torch.device) -> Tensor | None:
        start, end = self._used, self._used + -(-words // ALIGN) * ALIGN
        if end > len(self._memory) or device != self._memory.device:
            return None
        self._used = end
        return self._memory[start : start + words]


def zeros(words: int, device: torch.device) -> Tensor:
    """int32 [words], all 0."""
    scratch: Scratch | None = getattr(_active, "scratch", None)
    taken = None if scratch is None else scratch.take(words, device)
    return torch.zeros(words, dtype=torch.int32, device=device) if taken is None else taken
