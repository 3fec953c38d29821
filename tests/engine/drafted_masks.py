"""Masks along drafts against walks that accept the same tokens for good."""

from collections.abc import Callable

import numpy as np
from millrace_serve.engine.grammar.grammars import Walk


def bits_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def check_masks(new: Callable[[], Walk], seed: int, vocab_size: int, eos: int, after: int | None) -> tuple[int, bool]:
    """Any way into the grammar, then three drafts, most of them allowed. Returns how many masks there are, and whether
    the matcher began along the drafts."""
    rng, walk, fresh, tokens, drafts = np.random.default_rng(seed), new(), new(), [], []

    def some(mask: np.ndarray) -> int:
        kind = rng.random()
        if after is not None and kind < 0.3:
            return after
        return int(rng.choice(bits_of(mask)) if kind < 0.85 else rng.choice([eos, int(rng.integers(vocab_size))]))

    for _ in range(rng.integers(6)):
        token = some(walk.mask)
        if token != eos and token in bits_of(walk.mask):
            tokens.append(token)
            assert walk.accept([token]) is None
    assert fresh.accept(tokens) is None
    began_free = after is not None and after not in tokens
    masks = [fresh.mask.copy()]
    while len(drafts) < 3:
        drafts.append(some(fresh.mask))
        if len(masks) == len(drafts):  # every draft before was allowed
            allowed = drafts[-1] != eos and drafts[-1] in bits_of(fresh.mask)
            if allowed and fresh.accept([drafts[-1]]) is None:
                masks.append(fresh.mask.copy())

    for _ in range(2):
        found = walk.masks(drafts)
        assert len(found) == len(masks) and all((a == b).all() for a, b in zip(found, masks, strict=True))
        assert (walk.mask == masks[0]).all()
    accepted = drafts[: len(masks) - 1]
    assert walk.accept(accepted) is None and (walk.mask == masks[-1]).all()
    assert all((a == b).all() for a, b in zip(found, masks, strict=True)), "the masks are copies"
    return len(masks), began_free and after in accepted
