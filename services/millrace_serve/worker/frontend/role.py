"""What differs between workers. prefill/ and decode/ implement it; the frontend knows nothing else of them."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
from millrace.v1 import worker_pb2
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Events, Request, RequestId, Route
from millrace_serve.worker.messages import Report

if TYPE_CHECKING:
    from millrace_serve.worker.frontend.frontend import Frontend
    from millrace_serve.worker.frontend.links import Link


class RoleLogic(abc.ABC):
    service_names: Sequence[str]
    warmup_route: Route

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend

    @abc.abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicers of this role."""

    @abc.abstractmethod
    def submit(self, link: Link, message: Any) -> None:
        """Start work on a submit message of a Link. Raises MillraceError when it is refused."""

    def on_start(self, request: Request, replica: int) -> None:  # noqa: B027 - most roles need not know
        """A request, of a router or our own, is about to go to an engine."""

    @abc.abstractmethod
    def on_events(self, replica: int, events: Events) -> None:
        """What an engine said, before its outputs go to the routers."""

    @abc.abstractmethod
    def abort(self, id: RequestId) -> bool:
        """Stop what this role does for an attempt besides the engine's work. False: nothing."""

    @abc.abstractmethod
    def on_lost(self, error: MillraceError) -> None:
        """The worker dies: end everything that others wait for."""

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Parked pages or transfers: a drain waits for them."""

    def on_report(self, rank: int, report: Report) -> None:
        """Anything else a rank says."""
        raise TypeError(f"a {self.frontend.config.role} worker does not take {type(report).__name__}")

    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        """Run a request through a prefill worker and this one. Raises MillraceError."""
        raise MillraceError("INVALID_ARGUMENT", f"a {self.frontend.config.role} worker has no source", param="source")

    async def close(self) -> None:  # noqa: B027
        """The worker stops; nothing more is asked of the role."""
