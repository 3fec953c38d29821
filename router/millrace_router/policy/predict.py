"""Scores by predicted times, for requests with limits. Pure.

    first token   the prompt tokens ahead and those of the request, in chunks that the replica's streams leave time for
    TPOT          a step of the replica with one more sequence

The times are the replica's own (StepTimes); a replica that has not measured any is taken to be as fast as another one.
A score begins with the risk, in requests. 1: the request ends at a limit. What it costs the replica's streams counts
as well, where their limit leaves less than the least chunk, and at a prefill worker, whose chunks are whole: those from
before a change of its duty.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from millrace_common.step_times import AIM, StepTimes, prompt_pairs

from millrace_router.policy.scoring import Inputs, Score, spared
from millrace_router.policy.snapshot import MOST_CHUNK, Key, Replica

HANDOVER_S = 0.01  # between the first token and the second of a pair


def measured(replicas: Iterable[Replica]) -> StepTimes | None:
    """Step times to take where a replica has none. None: nobody has."""
    for replica in replicas:
        if replica.times.known:
            return replica.times
    return None


@dataclass(frozen=True, slots=True)
class Predictor:
    """The scorers of a request, one for each of its roles."""

    unmeasured: StepTimes  # of a replica that has not measured its own
    _tpot: dict[Key, float] = field(default_factory=dict)  # of replicas that were scored for both phases

    def prefill(self, candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
        """(risk, seconds until the first token) of replicas that hand the sequence over."""
        limit_s = inputs.want.slo.ttft_s
        rows = self.forecasts(candidates, inputs, hand_over=True)
        return [(_late(first / limit_s) + delayed, first) for first, _, delayed in rows]

    def decode(self, candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
        """(risk, TPOT) of replicas that go on with a sequence: of those that `whole` has scored."""
        limit_s = inputs.want.slo.tpot_s
        return [(_over(each / limit_s), each) for each in (self._tpot[r.key] for r in candidates)]

    def whole(self, candidates: Sequence[Replica], inputs: Inputs) -> list[Score]:
        """(risk, seconds until the first token, TPOT) of replicas that run both phases."""
        ttft_s, tpot_s = inputs.want.slo.ttft_s, inputs.want.slo.tpot_s
        rows = self.forecasts(candidates, inputs)
        self._tpot.update((r.key, each) for r, (_, each, _) in zip(candidates, rows, strict=True))
        return [(_late(first / ttft_s) + _over(each / tpot_s) + delayed, first, each) for first, each, delayed in rows]

    @staticmethod
    def times(role: str, score: Score) -> tuple[float, float]:
        """Seconds until the first token and TPOT of a role's score; 0 what the role does not do."""
        return (0.0 if role == "decode" else score[1]), (0.0 if role == "prefill" else score[-1])

    def forecasts(
        self, candidates: Sequence[Replica], inputs: Inputs, *, hand_over: bool = False
    ) -> list[tuple[float, float, float]]:
        """Seconds until the first token and TPOT at each, and the part of its streams' limits that the prompt costs.
        Written out as one loop: it runs for every replica and request. `hand_over`: chunks of such prompts are whole,
        whatever streams are beside them.
        """
        want, found = inputs.want, []
        length, limit_s, least = want.tokens, want.slo.tpot_s, want.page_size
        for replica, have in zip(candidates, spared(candidates, inputs), strict=True):
            times, streams = replica.times, replica.streams
            if not times.token_s:
                times = self.unmeasured
            step_s, chunk, harmed, within = times.fixed_s, float(MOST_CHUNK), 0, math.inf
            if streams:
                step_s += times.sequence_s * streams + times.key_s * replica.held
                busy_s, token_s = step_s + times.chunk_s, times.token_s or 1e-12
                harmed = streams if limit_s < busy_s + token_s * (MOST_CHUNK if hand_over else least) else 0
                if not hand_over:
                    within = (AIM * limit_s - busy_s) / token_s
                    worth = times.fewest(times.chunk_s, 0, MOST_CHUNK) if within >= least else least
                    chunk = min(max(within, worth), MOST_CHUNK)
            own, ahead = length - have, replica.tokens
            tokens = own + ahead
            pairs = prompt_pairs(have, own, chunk)
            if ahead:  # by prompts that are as long as this one
                pairs += ahead / length * prompt_pairs(0, length, chunk)
            steps = tokens / chunk if tokens > chunk else 1.0
            work_s = steps * times.chunk_s + times.token_s * tokens + times.pair_s * pairs
            outputs = min(want.outputs, replica.expected_output or want.outputs)
            delayed = harmed * work_s * own / (tokens * outputs * limit_s) if harmed else 0.0
            if least <= within < tokens:  # the mean step takes what the limit allows, behind a chunk of another prompt
                owed_s = min(times.chunk_s + times.token_s * chunk, work_s)
                work_s = max((work_s + owed_s) / max(1 - step_s / (AIM * limit_s), 1e-3) - steps * step_s, work_s)
            found.append((steps * step_s + work_s, step_s + times.sequence_s + times.key_s * length, delayed))
        return found


def _late(part: float) -> float:
    """The risk of a first token that is predicted for a part of its limit: from half of it on."""
    return 2 * part - 1 if part > 0.5 else 0.0


def _over(part: float) -> float:
    """By how much a part of a limit exceeds it."""
    return part - 1 if part > 1 else 0.0
