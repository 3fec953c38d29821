"""The frontend's side of its ranks: starts them, exchanges messages with them, notices a lost one.

Life: 1. `start` launches all ranks; 2. each reports RankReady, after which its inboxes can be sent to; 3. each report
goes to the handler of its type; 4. `stop`, after which they may be started again. A rank that fails, hangs or ends
before that is lost, and the worker with it: `on_lost` is called once.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import zmq
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import EngineInput
from millrace_serve.engine.health.rank_watch import RankHeartbeat, RankWatch
from millrace_serve.engine.start.phases import slowest
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.transfer.messages import StopReader, ToReader
from millrace_serve.worker.channels import Context, Receiver, Sender, channel_key
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.launcher import Launcher
from millrace_serve.worker.messages import (
    Answer,
    Dropped,
    FreezeGc,
    FromRank,
    GcFrozen,
    ProfileDone,
    RankFailed,
    RankReady,
    Report,
    SetWeights,
    StartProfile,
    Stop,
    StopProfile,
    ToEngine,
    ToProcess,
    WeightsSet,
)

log = logging.getLogger(__name__)
A = TypeVar("A", bound=Answer)
LAST_WORDS_S = 5.0  # between the end of a rank that says why and its message
Handler: TypeAlias = Callable[[int, Any], None]  # of a rank's report; Any: the type that it is registered for


class Ranks:
    def __init__(
        self,
        config: WorkerConfig,
        launcher: Launcher,
        handlers: Mapping[type, Handler],
        on_lost: Callable[[str], None],
        on_stray: Callable[[str], None] = lambda kind: None,
        on_compiled: Callable[[int, dict[str, int]], None] = lambda rank, compiled: None,
    ) -> None:
        """
        Args:
            handlers: of reports that are none of our business, by their type.
            on_stray: a message was dropped that cannot be decoded, or that nobody asked for; gets its kind.
            on_compiled: how many kernels a rank says that it has compiled, by library.
        """
        self._config = config
        self._launcher = launcher
        self.watch = RankWatch(config.num_ranks, config.timeouts.start, launcher.pid)
        self.handlers: dict[type, Handler] = {
            Dropped: lambda rank, report: on_stray("undecodable"),
            RankReady: self._connect,
            RankFailed: self._failed,
            GcFrozen: self._answered,
            ProfileDone: self._answered,
            WeightsSet: self._answered,
            RankHeartbeat: self._heard,
            **handlers,
        }
        self._on_lost = on_lost
        self._on_stray = on_stray
        self._on_compiled = on_compiled
        self._context: Context | None = None  # while there are ranks
        self._engines: dict[int, Sender[ToEngine]] = {}
        self._readers: dict[int, Sender[ToReader]] = {}
        self._infos: dict[int, RankReady] = {}
        self._asked: dict[tuple[type, int], asyncio.Future[Any]] = {}  # (answer's type, rank): answers to come
        self._watcher: asyncio.Task[None] | None = None
        self._lost = ""
        self._last_words: asyncio.TimerHandle | None = None
        self.exit_code = 1  # of a worker that cannot start; 2: another start would end alike
        self._stopping = False

    async def start(self, model: Path | None = None) -> None:
        """Returns when every rank is ready; again after `stop`. Raises MillraceError (WORKER_LOST) when one ends first,
        and OSError when the secret is unusable.

        Args:
            model: a checkpoint in the place of the configured one.
        """
        group = secrets.token_hex(16)
        self._key = channel_key(self._config.secret, group)
        self._stopping, self._context = False, zmq.Context()
        self.watch = RankWatch(self._config.num_ranks, self._config.timeouts.start, self._launcher.pid)
        self._inbox: Receiver[FromRank] = Receiver(
            self._context, self._launcher.bind(), FromRank, self._key, lambda: self._on_stray("undecodable")
        )
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.watch(self._take)
        config = self._config if model is None else self._config.model_copy(update={"model": model})
        await self._launcher.start(config, self._inbox.endpoint, group, self._on_exit)
        await self._ready
        self._watcher = asyncio.create_task(self._watch_ranks())  # a heartbeat of each has come before

    async def stop(self, grace_s: float) -> None:
        """Ranks that are not up yet, or beside a lost one, have no work to end, and are killed."""
        self._stopping = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._last_words is not None:
            self._last_words.cancel()
        if len(self._infos) < self._config.num_ranks or self._lost:
            grace_s = 0.0
        for engine in self._engines.values():
            engine.send(Stop())
        for reader in self._readers.values():
            reader.send(StopReader())
        await self._launcher.stop(grace_s)
        self._refuse(MillraceError(Reason.NOT_READY, "the ranks ended before they answered"))
        for known in (self._engines, self._readers, self._infos):
            known.clear()
        if self._context is not None:
            self._inbox.close()
            self._context.destroy(linger=0)
            self._context = None

    @property
    def info(self) -> RankReady | None:
        """The report of rank 0; its facts about the model are the same on all ranks. None before it is ready."""
        return self._infos.get(0)

    @property
    def ready_info(self) -> RankReady:
        """`info` of ranks that are up; raises MillraceError (NOT_READY) before that."""
        if (info := self.info) is None:
            raise MillraceError(Reason.NOT_READY, "the ranks are not up yet")
        return info

    def startup(self) -> dict[str, float]:
        """Seconds of each phase of the ranks' start."""
        return slowest([info.startup for info in self._infos.values()])

    def of_replica(self, replica: int) -> range:
        return range(replica * self._config.tp, (replica + 1) * self._config.tp)

    def memory_of(self, replica: int) -> list[MemoryHandle]:
        """The memory handles of a replica's pages, by tensor-parallel rank."""
        return [self._infos[rank].memory for rank in self.of_replica(replica)]

    def send(self, replica: int, message: EngineInput) -> None:
        """Send to the engine of a replica."""
        self._engines[self.of_replica(replica)[0]].send(message)

    def send_reader(self, rank: int, message: ToReader) -> None:
        if reader := self._readers.get(rank):  # none while the worker sleeps
            reader.send(message)

    async def freeze_gc(self) -> list[int]:
        """Objects frozen, by rank."""
        return [answer.objects for answer in await self._ask(FreezeGc(), GcFrozen)]

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileDone]:
        """Answers of all ranks. One call at a time."""
        return await self._ask(message, ProfileDone)

    async def set_weights(self, message: SetWeights) -> str:
        """One call at a time. Returns why a rank could not; empty: all could."""
        answers = await self._ask(message, WeightsSet)
        for rank, answer in enumerate(answers):
            self._infos[rank] = msgspec.structs.replace(self._infos[rank], layout=answer.layout)
        return next((f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error), "")

    async def _ask(self, message: ToProcess, answer: type[A]) -> list[A]:
        """Answers to `message`, by rank; calls that overlap share them. Raises MillraceError."""
        if len(self._infos) < self._config.num_ranks:  # during a start, and while the worker sleeps
            raise MillraceError(Reason.NOT_READY, "the ranks are not up")
        for rank, engine in self._engines.items():
            if (answer, rank) not in self._asked:
                self._asked[answer, rank] = asyncio.get_running_loop().create_future()
                engine.send(message)
        ranks = sorted(self._engines)  # which were ready in any order
        return list(await asyncio.gather(*(asyncio.shield(self._asked[answer, rank]) for rank in ranks)))

    def _take(self, message: FromRank) -> None:
        """Handle a report. An exception ends the worker: the report would be lost, and a request may wait for it."""
        if kind := self._stray(message.rank, message.report):
            log.warning("dropped an unexpected %s of rank %d", kind, message.rank)
            self._on_stray(kind)
            return
        try:
            self.handlers[type(message.report)](message.rank, message.report)
        except Exception as error:
            log.exception("a report of rank %d could not be handled", message.rank)
            self._lose(f"a report of rank {message.rank}: {type(error).__name__}: {error}")

    def _stray(self, rank: int, report: Report) -> str:
        """The kind of a report that cannot be of one of our ranks now; empty: it can."""
        known = 0 <= rank < self._config.num_ranks
        asked = not isinstance(report, Answer) or (type(report), rank) in self._asked
        first = not isinstance(report, RankReady) or rank not in self._infos
        return "" if known and asked and first else type(report).__name__

    def _failed(self, rank: int, report: RankFailed) -> None:
        self.exit_code = 2 if report.refused else 1
        self._lose(f"rank {rank} failed: {report.message}")

    def _answered(self, rank: int, answer: Answer) -> None:
        self._asked.pop((type(answer), rank)).set_result(answer)

    def _heard(self, rank: int, heartbeat: RankHeartbeat) -> None:
        self.watch.heard(rank, heartbeat)
        self._on_compiled(rank, heartbeat.compiled)

    async def _watch_ranks(self) -> None:
        self._lose(await self.watch.until_hung())

    def _connect(self, rank: int, info: RankReady) -> None:
        self._infos[rank] = info
        assert self._context is not None
        self._engines[rank] = Sender(self._context, info.engine_endpoint, self._key)
        if info.reader_endpoint:
            self._readers[rank] = Sender(self._context, info.reader_endpoint, self._key)
        if len(self._infos) == self._config.num_ranks and not self._ready.done():
            self._ready.set_result(None)

    def _on_exit(self, rank: int, how: str) -> None:
        if self._stopping:
            return
        why, messages = f"rank {rank} ended ({how})", self._inbox.receive()
        for message in messages:
            if message.rank == rank:  # its RankFailed has the reason
                self._take(message)
        if how.endswith("exit code 1"):  # it has sent one, which may still be on its way
            self._last_words = asyncio.get_running_loop().call_later(LAST_WORDS_S, self._lose, why)
        else:
            self._lose(why)
        for message in messages:
            if message.rank != rank:  # what others say of the end comes after it
                self._take(message)

    def _lose(self, why: str) -> None:
        if self._stopping or self._lost:
            return
        self._lost = why
        log.error("%s", why)
        error = MillraceError(Reason.WORKER_LOST, why)
        if not self._ready.done():
            self._ready.set_exception(error)
        self._refuse(error)
        self._on_lost(why)

    def _refuse(self, error: MillraceError) -> None:
        """No answer comes to what was asked. A question that stayed would be taken for one to the next ranks."""
        for answer in self._asked.values():
            answer.set_exception(error)
        self._asked.clear()
