"""The differences between the roles: prefill/ and decode/ implement `RoleLogic` for the frontend."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Events, Failure, Route
from millrace_serve.worker.frontend.links import Links, RouterLink
from millrace_serve.worker.frontend.ranks import Handler


class RoleLogic(abc.ABC):
    """Made by the frontend from itself, once its ranks and requests are there."""

    service_names: Sequence[str]
    warmup_route: Route
    handlers: Mapping[type, Handler]  # of reports of ranks that are not for all roles

    @property
    def warmed_sources(self) -> Iterable[str]:
        """Epochs of the prefill workers whose pair with this one is warm."""
        return ()

    @abc.abstractmethod
    def register(self, server: grpc.aio.Server, links: Links) -> None:
        """Add the servicers of this role."""

    @abc.abstractmethod
    def submit(self, link: RouterLink, message: Any) -> None:
        """Start work on a submit message of a Link. Raises MillraceError when it is refused."""

    @abc.abstractmethod
    def on_events(self, replica: int, events: Events) -> None:
        """Handle an engine's events, before its outputs go to the routers."""

    def on_lost(self, why: Failure) -> None:  # noqa: B027
        """The worker dies, or forgets its weights: end what other processes wait for."""

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Held pages or transfers: a drain waits for them."""

    async def disconnect(self) -> None:  # noqa: B027
        """The ranks are about to end: what they are connected with."""

    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        """Run a request through a prefill worker and this one. Raises MillraceError."""
        raise MillraceError(Reason.INVALID_ARGUMENT, "only a decode worker has a source", param="source")

    async def close(self) -> None:  # noqa: B027
        """The worker stops; the role gets no further calls."""
