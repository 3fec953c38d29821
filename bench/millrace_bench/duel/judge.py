"""What a duel concludes from what clients saw: pure functions."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millrace_load.clients import Sample

from millrace_bench.duel.ties import Judged

Key = tuple[int, int]  # a conversation's index, and a turn of it
Seen = Mapping[Key, Sample]
GREEDY = "greedy"  # the kind of request whose wrong tokens can be told from near-ties
HUNG = "HUNG"  # the error of a request whose client gave up


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers of a run that the control has too, and which of them differ from it."""

    answers: int = 0
    differ: tuple[Key, ...] = ()


def compare(control: Seen, run: Seen, kind: int = 0, kinds: int = 1) -> Compared:
    """Of requests of a kind, of so many in turns, whose control is whole. A failed one counts by what came of it, which
    must be a beginning of the answer.
    """
    keys = [key for key, one in control.items() if key[0] % kinds == kind and one.answered and key in run]
    begun = [key for key in keys if run[key].arrivals]
    return Compared(len(begun), tuple(key for key in begun if not _agree(control[key], run[key])))


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


def conclude(
    strike: float, control: Seen, run: Seen, noisy: Mapping[str, bool], judged: Judged | None
) -> dict[str, Any]:
    """The row of a fault that struck then. `noisy`: by kind of requests, in their turns, whether answers differ without
    a wrong token; then nobody can tell what is wrong, but for greedy answers that were `judged`.
    """
    differ = {kind: len(compare(control, run, number, len(noisy)).differ) for number, kind in enumerate(noisy)}
    exact = [kind for kind in noisy if judged is None or kind != GREEDY]
    judged = judged or Judged()
    errors = Counter(sample.error or "EMPTY" for sample in run.values() if not sample.answered)
    return {
        "requests": len(run),
        "differ": sum(differ.values()),
        **asdict(judged),
        "wrong": judged.wrong + sum(differ[kind] for kind in exact if not noisy[kind]),
        "cannot_be_told": sum(differ[kind] for kind in exact if noisy[kind]),
        "hung": errors.pop(HUNG, 0),
        "errors": dict(errors),
        "error_free_s": error_free_s(strike, run.values()),
    }
