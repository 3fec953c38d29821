"""A list that does not change."""

from __future__ import annotations

from collections.abc import Iterable

from millrace_router.discovery.base import Listener, Target, one_per_address
from millrace_router.discovery.config import StaticTarget


class StaticSource:
    def __init__(self, targets: Iterable[StaticTarget]) -> None:
        self._targets = one_per_address(
            Target(t.address, t.address, revision=t.revision, topology=t.topology) for t in targets
        )

    def start(self, listener: Listener) -> None:
        listener.on_targets(self._targets)

    async def stop(self) -> None:
        pass
