"""Who waits for which attempt: outputs of the engines find their way back to the Link (or the warm-up) they belong to.

Life of an attempt here: 1. `start`, when a request goes to an engine; 2. `deliver`, any number of times; 3. it is
forgotten with its final output, with a prefill worker's first token (which is all that is due there), by `fail`, or by
`forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from millrace_serve.engine.core import Failure, FinishReason, RequestId, Route, SequenceOutput
from millrace_serve.worker.frontend.wakeup import Wakeup


class Owner(Protocol):
    def put(self, output: SequenceOutput) -> None:
        """Must not block."""


class Attempt(NamedTuple):
    owner: Owner
    replica: int
    route: Route


class Attempts:
    def __init__(self, on_stale: Callable[[str], None]) -> None:
        """`on_stale(kind)` counts messages for attempts that nobody works on."""
        self.changed = Wakeup()  # fires when an attempt ends
        self._live: dict[RequestId, Attempt] = {}
        self._on_stale = on_stale

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._live

    def __iter__(self) -> Iterator[RequestId]:
        return iter(list(self._live))

    def start(self, id: RequestId, attempt: Attempt) -> None:
        assert id not in self._live, f"{id} is live"
        self._live[id] = attempt

    def replica_of(self, id: RequestId) -> int | None:
        attempt = self._live.get(id)
        return attempt.replica if attempt else None

    def owner_of(self, id: RequestId) -> Owner | None:
        attempt = self._live.get(id)
        return attempt.owner if attempt else None

    def deliver(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            attempt = self._live.get(output.id)
            if attempt is None:
                if output.finish is not FinishReason.ABORT:  # which answers our own Abort
                    self._on_stale("output")
                continue
            if output.finish is not None or attempt.route is Route.EXPORT:
                self._end(output.id)
            attempt.owner.put(output)

    def fail(self, id: RequestId, failure: Failure, first_index: int = 0) -> bool:
        """End an attempt with an error, whatever the engine says later. False: it was not live."""
        attempt = self._live.get(id)
        if attempt is None:
            return False
        self._end(id)
        attempt.owner.put(SequenceOutput(id, first_index, [], FinishReason.ERROR, failure))
        return True

    def owned_by(self, owner: Owner) -> list[RequestId]:
        return [id for id, attempt in self._live.items() if attempt.owner is owner]

    def forget(self, id: RequestId) -> None:
        """Nobody wants to hear the rest. Idempotent."""
        if id in self._live:
            self._end(id)

    def _end(self, id: RequestId) -> None:
        del self._live[id]
        self.changed.fire()
