"""What depends on the role of a worker: handover/role.py implements `RoleLogic` for the frontend."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
from millrace.v1 import worker_pb2

from millrace_serve.engine.core import Events, Failure, Route
from millrace_serve.worker.frontend.links import Links, RouterLink
from millrace_serve.worker.frontend.ranks import Handler


class RoleLogic(abc.ABC):
    """Made by the frontend from itself, once its ranks and requests are there."""

    service_names: Sequence[str]
    handlers: Mapping[type, Handler]  # of reports of ranks that are not for all roles

    @property
    @abc.abstractmethod
    def warmup_routes(self) -> Iterable[Route]:
        """Of the requests that warm this worker up without another one."""

    @property
    @abc.abstractmethod
    def warmed_sources(self) -> Iterable[str]:
        """Epochs of the workers whose pages this one reads, and whose pair with it is warm."""

    @abc.abstractmethod
    def register(self, server: grpc.aio.Server, links: Links) -> None:
        """Add the servicers of this role."""

    @abc.abstractmethod
    def submit(self, link: RouterLink, message: Any) -> None:  # of the role's own kind
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

    @abc.abstractmethod
    async def warm_pair(self, source: worker_pb2.KvSourceRef) -> None:
        """Run a request through the worker at `source` and this one. Raises MillraceError."""

    async def close(self) -> None:  # noqa: B027
        """The worker stops; the role gets no further calls."""
