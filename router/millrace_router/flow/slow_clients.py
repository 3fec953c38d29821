"""Streams whose client takes nothing of them end, because what they hold is needed by others.

Over HTTP the connection tells (millrace_rpc/http_connection.py) and ends. Over gRPC a message is taken when the
transport has room for it, which flow control gives as the client reads. The call's task ends at once; the status waits
in the transport for a client that reads after all.
"""

import asyncio
import contextlib
import logging
from typing import Self

import grpc
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_router.flow.heartbeat import Heartbeat
from millrace_router.flow.stream import Stream

log = logging.getLogger(__name__)
_ending: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task


def lose(stream: Stream, limit_s: float) -> MillraceError:
    """End a stream of which nothing was taken for so long: its workers are free, and it counts as SLOW_CLIENT."""
    error = MillraceError(Reason.SLOW_CLIENT, f"the client has read nothing of its stream for {limit_s:g} s")
    log.info("the router ends a stream: %s", error.message)
    stream.close(error)
    return error


class Patience:
    """With the client of a gRPC call: from `leave` until `away` is false it has `limit_s` seconds to take a message.
    Entered in the task of the call. `clock`: an event loop.
    """

    def __init__(
        self, stream: Stream, context: grpc.aio.ServicerContext, limit_s: float, clock: asyncio.AbstractEventLoop
    ) -> None:
        self.away = False
        self._stream, self._context, self._limit_s = stream, context, limit_s
        self._watch = Heartbeat(limit_s, clock)
        self._task = asyncio.current_task()

    def leave(self) -> None:
        self._watch.sent_at, self.away = self._watch.now(), True

    def __enter__(self) -> Self:
        self._watch.start(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.stop()

    def _look(self) -> None:
        if self.away and self._task is not None and not self._task.cancelling():
            error = lose(self._stream, self._limit_s)
            self._task.cancel()  # it waits until the message is taken
            ending = asyncio.create_task(self._abort(error))
            _ending.add(ending)
            ending.add_done_callback(_ending.discard)

    async def _abort(self, error: MillraceError) -> None:
        status = error.to_status()
        with contextlib.suppress(grpc.aio.BaseError):  # that it was aborted, or that its connection ends
            await self._context.abort(status.code, status.details, status.trailing_metadata)
