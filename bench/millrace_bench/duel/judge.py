"""What a duel concludes from what clients saw: pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from millrace_load.clients import Sample

Key = tuple[int, int]  # a conversation's index, and a turn of it
Seen = Mapping[Key, Sample]
HUNG = "HUNG"  # the error of a request whose client gave up


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers of a run that the control has too, and those of them that differ from it."""

    answers: int = 0
    differ: int = 0


def compare(control: Seen, run: Seen, kind: int = 0, kinds: int = 1) -> Compared:
    """Of requests of a kind, of so many in turns, whose control is whole. A failed one counts by what came of it, which
    must be a beginning of the answer.
    """
    keys = [key for key, one in control.items() if key[0] % kinds == kind and one.answered and key in run]
    pairs = [(control[key], run[key]) for key in keys if run[key].arrivals]
    return Compared(len(pairs), sum(not _agree(*pair) for pair in pairs))


def _agree(control: Sample, other: Sample) -> bool:
    if other.answered:
        return other.text == control.text
    return control.text.startswith(other.text.rstrip("\ufffd"))  # half of a character


def wrong(noise: Compared, found: Compared) -> int:
    """Answers that differ beyond the noise, which is what two undisturbed runs differ by.

    Noise explains its share of the answers and two standard deviations more. A server without noise is given nothing.
    """
    share = noise.differ / noise.answers if noise.answers else 0.0
    explained = found.answers * share + 2 * math.sqrt(found.answers * share * (1 - share))
    return max(0, math.ceil(found.differ - explained))


def error_free_s(strike: float, samples: Collection[Sample]) -> float | None:
    """Seconds from a strike until the last error that a client saw; 0: none. None: nothing was answered after it."""
    failed = [sample for sample in samples if not sample.answered and sample.end >= strike]
    if not failed:
        return 0.0
    latest = max(sample.due for sample in failed)
    healed = any(sample.answered and sample.due > latest for sample in samples)
    return max(sample.end for sample in failed) - strike if healed else None


def conclude(strike: float, control: Seen, run: Seen, noise: Mapping[str, Compared]) -> dict[str, Any]:
    """The row of a fault that struck then. `noise` has the kinds of requests, in their turns."""
    found = {kind: compare(control, run, number, len(noise)) for number, kind in enumerate(noise)}
    errors = Counter(sample.error or "EMPTY" for sample in run.values() if not sample.answered)
    return {
        "requests": len(run),
        "differ": sum(one.differ for one in found.values()),
        "wrong": sum(wrong(noise[kind], one) for kind, one in found.items()),
        "hung": errors.pop(HUNG, 0),
        "errors": dict(errors),
        "error_free_s": error_free_s(strike, run.values()),
    }
