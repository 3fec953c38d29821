"""What a duel concludes from what clients saw: pure functions."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from millrace_load.clients import Sample

from millrace_bench.duel.evidence import Judged

Key = tuple[int, int]  # a conversation's index, and a turn of it
Seen = Mapping[Key, Sample]
GREEDY = "greedy"  # the kind of request whose answers may part at exact ties
HUNG = "HUNG"  # the error of a request whose client gave up


def compare(control: Seen, run: Seen, kind: int = 0, kinds: int = 1) -> tuple[int, list[Key]]:
    """How many answers of a run the control has too, and which of them differ from it.

    Of requests of a kind, of so many in turns, whose control is whole. A failed one counts by what came of it, which
    must be a beginning of the answer.
    """
    keys = [key for key, one in control.items() if key[0] % kinds == kind and one.answered and key in run]
    begun = [key for key in keys if run[key].arrivals]
    return len(begun), [key for key in begun if not _agree(control[key], run[key])]


def _agree(control: Sample, other: Sample) -> bool:
    if other.answered:
        return other.text == control.text
    return control.text.startswith(other.text.rstrip("\ufffd"))  # half of a character


def error_free_s(strike: float, samples: Collection[Sample]) -> float | None:
    """Seconds from a strike until the last error that a client saw; 0: none. None: nothing was answered after it."""
    failed = [sample for sample in samples if not sample.answered and sample.end >= strike]
    if not failed:
        return 0.0
    latest = max(sample.due for sample in failed)
    healed = any(sample.answered and sample.due > latest for sample in samples)
    return max(sample.end for sample in failed) - strike if healed else None


def conclude(strike: float, run: Seen, differ: int, judged: Judged, untold: int) -> dict[str, Any]:
    """The row of a fault that struck then. `untold`: answers that differ, of kinds whose wrong words cannot be told."""
    errors = Counter(sample.error or "EMPTY" for sample in run.values() if not sample.answered)
    return {
        "requests": len(run),
        "differ": differ,
        **asdict(judged),
        "cannot_be_told": untold,
        "hung": errors.pop(HUNG, 0),
        "errors": dict(errors),
        "error_free_s": error_free_s(strike, run.values()),
    }
