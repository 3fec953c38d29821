"""A decision of the policy as a message for operators."""

from __future__ import annotations

from millrace.v1 import admin_pb2 as pb

from millrace_router.policy.decision import Decision, Selection


def explained(decision: Decision) -> pb.PlacementDecision:
    want = decision.situation.want
    return pb.PlacementDecision(
        attempt=want.attempt,
        way=decision.way,
        prompt_tokens=want.tokens,
        cached_tokens=decision.cached_tokens,
        selections=map(_selection, decision.explain()),
    )


def _selection(selection: Selection) -> pb.Selection:
    candidates = [
        pb.Candidate(
            address=row.key[0],
            replica=row.key[1],
            chosen=row.key == selection.chosen,
            excluded=row.excluded,
            score=row.score,
            cached_tokens=row.cached_tokens,
        )
        for row in selection.candidates
    ]
    return pb.Selection(role=selection.role, policy=selection.policy, candidates=candidates)
