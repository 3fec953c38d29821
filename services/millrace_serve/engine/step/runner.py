"""The interface of a runner. Steps run in the order of their launches, and `launch` does not wait for them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.step.batch import HostBatch

Announce = Callable[[str], AbstractContextManager[object]]  # what takes long, before it begins; it ends with the block


class StepHandle(Protocol):
    def done(self) -> bool:
        """Whether `result` has nothing to wait for."""

    def result(self) -> StepOutput:
        """Wait for the step. Raises what the step raised."""


class Runner(Protocol):
    """Keeps the state of every slot, so that the next step can be launched before this one was read."""

    def launch(self, batch: HostBatch) -> StepHandle: ...

    def counts(self) -> dict[str, object]:
        """The fields of engine.core.Load that the runner knows."""

    def close(self) -> None:
        """Stop. Launched steps may be dropped."""
