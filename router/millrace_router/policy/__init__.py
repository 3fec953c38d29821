"""Which workers serve a request. choose.py decides, from an immutable snapshot (snapshot.py) and what the indexes know
of the workers' prefix caches (indexes.py); each policy is one small file with one scoring function (scoring.py).
"""

from millrace_router.policy.choose import Chooser, Situation
from millrace_router.policy.decision import Decision, Decisions
from millrace_router.policy.indexes import Indexes
from millrace_router.policy.placer import Placer
from millrace_router.policy.snapshot import Pair, Placement, Replica, Unified, View, Want

__all__ = [
    "Chooser",
    "Decision",
    "Decisions",
    "Indexes",
    "Pair",
    "Placement",
    "Placer",
    "Replica",
    "Situation",
    "Unified",
    "View",
    "Want",
]
