"""Scores by predicted times, for requests with limits. Pure.

    first token   the prompt tokens ahead and those of the request, in chunks that the replica's streams leave time for
    TPOT          a step of the replica with one more sequence

The times are the replica's own (StepTimes); a replica that has not measured any is taken to be as fast as another one.
A score begins with the violation: by how much of its limits the request would exceed them. 0: it stays within.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace_common.split import Slo, headroom
from millrace_common.step_times import StepTimes

from millrace_router.policy.loans import saved
from millrace_router.policy.scoring import Inputs, Score
from millrace_router.policy.snapshot import Replica, Want

MOST_CHUNK, LEAST_CHUNK = 2048, 16  # prompt tokens of a step
HANDOVER_S = 0.01  # between the first token and the second of a pair


def measured(replicas: Iterable[Replica]) -> StepTimes | None:
    """Step times to take where a replica has none. None: nobody has."""
    for replica in replicas:
        if replica.times.known:
            return replica.times
    return None


def first_token_s(replica: Replica, want: Want, have: float, times: StepTimes) -> float:
    """`have`: tokens of the prompt that it need not compute."""
    streams = replica.streams
    keys = replica.held if streams else 0
    chunk = headroom(times, want.slo.tpot_s, streams, keys, MOST_CHUNK) if streams else MOST_CHUNK
    own, ahead = want.tokens - have, replica.tokens
    steps = (own + ahead) / max(chunk, LEAST_CHUNK)
    pairs = own * (have + own / 2) + ahead * want.tokens / 2  # the prompts ahead are as long as this one
    work = times.token_s * (own + ahead) + times.pair_s * pairs
    return max(steps, 1.0) * (times.step_s(streams, keys) + times.chunk_s) + work


def tpot_s(replica: Replica, want: Want, times: StepTimes) -> float:
    """Of a step with the request beside what the replica has."""
    return times.step_s(replica.streams + 1, replica.held + want.tokens)


def violation(first_s: float, each_s: float, slo: Slo) -> float:
    return max(first_s / slo.ttft_s - 1, 0.0) + max(each_s / slo.tpot_s - 1, 0.0)


@dataclass(frozen=True, slots=True)
class Predictor:
    """The scorers of a request, one for each of its roles."""

    unmeasured: StepTimes  # of a replica that has not measured its own

    def prefill(self, candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
        """(violation, seconds until the first token) of replicas that hand the sequence over."""
        slo = inputs.want.slo
        return [(violation(first, 0.0, slo), first) for first in self._first(candidates, inputs)]

    def decode(self, candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
        """(violation, TPOT) of replicas that go on with a sequence."""
        slo = inputs.want.slo
        return [(violation(0.0, each, slo), each) for each in self._each(candidates, inputs)]

    def whole(self, candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
        """(violation, seconds until the first token, TPOT) of replicas that run both phases."""
        slo = inputs.want.slo
        rows = zip(self._first(candidates, inputs), self._each(candidates, inputs), strict=True)
        return [(violation(first, each, slo), first, each) for first, each in rows]

    @staticmethod
    def times(role: str, score: Score) -> tuple[float, float]:
        """Seconds until the first token and TPOT of a role's score; 0 what the role does not do."""
        return (0.0 if role == "decode" else score[1]), (0.0 if role == "prefill" else score[-1])

    def _first(self, candidates: Sequence[Replica], inputs: Inputs) -> list[float]:
        want = inputs.want
        have = saved(candidates, [inputs.cached(r) for r in candidates], want, inputs.lenders)
        rows = zip(candidates, have, strict=True)
        return [first_token_s(r, want, tokens, self._times(r)) for r, tokens in rows]

    def _each(self, candidates: Sequence[Replica], inputs: Inputs) -> list[float]:
        return [tpot_s(r, inputs.want, self._times(r)) for r in candidates]

    def _times(self, replica: Replica) -> StepTimes:
        return replica.times if replica.times.known else self.unmeasured
