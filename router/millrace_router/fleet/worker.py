"""The router's view of one worker, and the task that keeps the connection.

1. Connect: GetInfo, check the version of its API.
2. Watch its load and its progress (health/progress.py). A stream that breaks means that the worker is lost.
3. As soon as it is READY: call GetInfo again (now with model and layout) and open the Link.
4. When any of these fails, or the process at the address is another one: close the Link, which fails every attempt
   there at once; back to 1 after a pause, unless discovery has dropped it.

warmups.py pairs and warms workers; registry.py decides which are routable. `on_change` is called when the worker's
state may have changed, `on_load` when only numbers have.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import fields

import grpc
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_common.step_times import StepTimes
from millrace_common.versions import MOST_REPLICAS, WORKER_API
from millrace_rpc.client import channel, heard_within
from millrace_rpc.enums import name_of
from millrace_rpc.errors import FieldError, MillraceError, check_count, from_rpc_error
from millrace_rpc.tls import Identity

from millrace_router.config import Timeouts
from millrace_router.discovery.base import Target
from millrace_router.fleet.link import DECODE, FLEXIBLE, PREFILL, ROLES, UNIFIED, Link
from millrace_router.health.progress import WorkerWatch
from millrace_router.policy.snapshot import UNLIMITED, Replica

log = logging.getLogger(__name__)

READY, PAUSED = worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_PAUSED
ROLE_OF_DUTY = {worker_pb2.DUTY_PREFILL: PREFILL, worker_pb2.DUTY_DECODE: DECODE}  # any other: UNIFIED
# A report may have been made before a request of so long ago came. Of the room, what is counted twice costs little.
CLAIM_S = 0.1
UNFIT = {Reason.LAYOUT_MISMATCH, Reason.INVALID_ARGUMENT}  # as long as the same process is there
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
CONNECT_S = 3.0  # for a worker's answer to GetInfo, and to the Link's hello


class Worker:
    def __init__(
        self,
        target: Target,
        router: worker_pb2.LinkHello,
        timeouts: Timeouts,
        metrics: Metrics,
        on_change: Callable[[], None],
        on_load: Callable[[], None],
        identity: Identity | None = None,
        token: str = "",
    ) -> None:
        self.target = target  # as discovery saw it last
        self.address = target.address
        self.leaving = False  # discovery no longer lists it
        self.info = worker_pb2.WorkerInfo()  # of the latest session
        self.load: worker_pb2.LoadSnapshot | None = None  # None: not reachable
        self.link: Link | None = None  # None: not linked
        self._control: worker_pb2_grpc.WorkerServiceStub | None = None
        self.watch = WorkerWatch(timeouts)
        self.drained_epoch = ""  # the process that an operator told to drain
        self.trouble = "not connected yet"  # why the latest session ended
        self._router = router  # the same to every worker; the epoch is that of the session
        self._metrics = metrics
        self._replicas: tuple[Replica, ...] = ()
        self._made_from: tuple[object, ...] | None = None  # what _replicas shows; None: more has been sent since
        self._on_change = on_change
        self._on_load = on_load
        self._identity = identity
        self._token = token
        self._pause = FIRST_PAUSE_S  # before the next session
        self._claims: deque[tuple[float, int, int]] = deque()  # when sent, to which replica, tokens of its room
        self._sent: dict[int, tuple[int, int, int]] = {}  # replica: what was sent since the latest load, see note_sent
        self._others: list[int] = []  # of each replica: its sequences that are not this router's
        self._found: list[int] = []  # the same by the latest report alone

    @property
    def role(self) -> worker_pb2.Role:
        return self.info.role

    @property
    def duty(self) -> worker_pb2.Duty:
        """Of a flexible worker, as it reports it."""
        return self.load.duty if self.load is not None else worker_pb2.DUTY_UNSPECIFIED

    @property
    def flexible(self) -> bool:
        return self.role == FLEXIBLE

    @property
    def serves_as(self) -> worker_pb2.Role:
        """The role that requests see: a flexible worker's duty."""
        return ROLE_OF_DUTY.get(self.duty, UNIFIED) if self.flexible else self.role

    @property
    def epoch(self) -> str:
        return self.info.epoch

    @property
    def weights(self) -> str:
        """A hash of the model: equal ones give equal answers. Empty until it is READY."""
        return self.info.layout.model

    @property
    def control(self) -> worker_pb2_grpc.WorkerServiceStub:
        """WORKER_LOST while there is no connection."""
        if self._control is None:
            raise MillraceError(Reason.WORKER_LOST, f"worker {self.address} is {self.unhealthy}")
        return self._control

    @property
    def in_flight(self) -> int:
        return 0 if self.link is None else self.link.in_flight

    @property
    def unhealthy(self) -> str:
        """Why the worker cannot serve; empty when it can."""
        if self.load is None:
            return f"unreachable: {self.trouble}"
        if self.load.state != READY:
            return f"{name_of(worker_pb2.WorkerState, self.load.state)} {self.info.state_message}".rstrip()
        if self.watch.stuck is not None:
            return "stuck: its numbers have not changed since it was lost"
        return "not linked yet" if self.link is None else ""

    @property
    def paused(self) -> bool:
        """It keeps what it works on, and makes no progress until an operator resumes it."""
        return self.load is not None and self.load.state == PAUSED

    @property
    def withheld(self) -> str:
        """Why the worker gets no new requests; empty when it may get them."""
        if self.leaving:
            return "no longer discovered"
        return "draining" if self.drained_epoch and self.drained_epoch == self.epoch else self.target.withheld

    @property
    def role_name(self) -> str:
        """One of states.ROLES."""
        return (name_of(worker_pb2.Role, self.role) if self.role else self.target.role) or "unspecified"

    def source(self) -> worker_pb2.KvSourceRef:
        fingerprint = self.info.layout.fingerprint
        return worker_pb2.KvSourceRef(address=self.address, epoch=self.epoch, fingerprint=fingerprint)

    def note_sent(self, replica: int, tokens: int, held: int, outputs: int) -> None:
        """Count a sent request as load until the next load report, so that a burst is spread. `tokens` will be computed
        there, the KV of `held` tokens will be fetched, and `outputs` are expected there.
        """
        requests, total, fetched = self._sent.get(replica, (0, 0, 0))
        self._sent[replica] = requests + 1, total + tokens, fetched + held
        self._claims.append((time.monotonic(), replica, tokens + held + outputs))
        self._made_from = None

    def note_load(self, load: worker_pb2.LoadSnapshot) -> None:
        self.load = load
        self._sent.clear()
        found = [max(one.active - self._open(index), 0) for index, one in enumerate(load.replicas)]
        before = self._found if len(self._found) == len(found) else found
        self._others, self._found = list(map(min, found, before)), found  # one late report counts what has ended
        while self._claims and self._claims[0][0] < time.monotonic() - CLAIM_S:
            self._claims.popleft()

    def replicas(self, sources: frozenset[str] = frozenset()) -> tuple[Replica, ...]:
        """A snapshot of each replica for the policy; the same objects until something changes."""
        made_from = (self.load, self.target, sources, self.link and self.link.ended)
        if self._made_from is None or any(a is not b for a, b in zip(made_from, self._made_from, strict=True)):
            loads = enumerate(self.load.replicas if self.load else ())
            self._replicas = tuple(self._replica(index, load, sources) for index, load in loads)
            self._made_from = made_from
        return self._replicas

    def _replica(self, index: int, load: worker_pb2.ReplicaLoad, sources: frozenset[str]) -> Replica:
        requests, tokens, held = self._sent.get(index, (0, 0, 0))
        filled = load.pages_running * self.info.layout.page_size - load.begun_tokens
        room = load.room if load.HasField("room") else UNLIMITED
        sequences = load.running + load.waiting + load.importing + requests
        capacity, free_slots = load.capacity - requests, UNLIMITED
        if load.max_running:  # what it was asked and has answered counts at once, whatever the report knows of it
            active = self._open(index) + self._others[index]
            free_slots = load.max_running - active
            if load.capacity or load.active >= load.max_running:  # else it has no pages
                capacity = load.capacity + load.active - active
        streams = sequences
        if self.serves_as == PREFILL:  # it has at most streams from before
            streams = load.running if self.flexible else 0
        return Replica(
            address=self.address,
            index=index,
            epoch=self.epoch,
            fingerprint=self.info.layout.fingerprint,
            capacity=capacity,
            tokens=load.waiting_tokens + tokens,
            sequences=sequences,
            sources=sources,
            held=max(filled, 0) + held,
            room=room - sum(tokens for _, replica, tokens in self._claims if replica == index),
            expected_output=load.expected_output,
            context=self.info.max_context,
            labels=self.target.topology,
            revision=self.target.revision,
            page_bytes=self.info.layout.page_bytes,
            output_tokens_per_s=load.output_tokens_per_s,
            read_bytes_per_s=self.load.read_bytes_per_s if self.load else 0.0,
            prefix_fetch_s=self.load.prefix_fetch_seconds if self.load else 0.0,
            times=StepTimes(*(getattr(load.step_times, part.name) for part in fields(StepTimes))),
            streams=streams,
            flexible=self.flexible,
            free_slots=free_slots,
        )

    def _open(self, replica: int) -> int:
        """Sub-requests of this router."""
        return self.link.open[replica] if self.link is not None else 0

    async def run(self) -> None:
        """Keep the connection. Ends by cancellation, or with the connection when it is leaving."""
        while True:
            error = await self._session()
            if self.load is not None:
                log.warning("worker %s lost: %s", self.address, error.message)
            elif error.reason is Reason.UNAUTHENTICATED and error.message != self.trouble:
                log.error("worker %s refuses this router: %s", self.address, error.message)
            elif error.reason in UNFIT and error.message != self.trouble:
                log.warning("worker %s cannot be used: %s", self.address, error.message)
            self.load, self.trouble, self.watch.load = None, error.message, worker_pb2.LoadSnapshot()
            self._on_change()
            if self.leaving:
                return
            await asyncio.sleep(self._pause * random.uniform(0.8, 1.2))
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    async def _session(self) -> MillraceError:
        """Steps 1 to 3, until the first failure."""
        try:
            async with channel(self.address, self._identity, self._token) as ch:
                self._control = worker_pb2_grpc.WorkerServiceStub(ch)
                self.info = await self._ask()
                ready = asyncio.Event()
                await _first_end(self._watch(ready), self._hold_link(ch, ready))
        except grpc.RpcError as error:
            return from_rpc_error(error)
        except TimeoutError:
            return MillraceError(Reason.WORKER_LOST, "it is silent")
        except Exception as error:  # also garbage of the worker's, or a fault of ours: it would never connect again
            return MillraceError.of(error, log, "the connection to worker %s broke unexpectedly", self.address)
        finally:
            self._control = None  # also by a cancellation: a hook or an operator's call may still have this worker
        raise AssertionError("both go on until one fails")

    async def refresh(self) -> None:
        """Call GetInfo on the same process again. Raises MillraceError or RpcError."""
        info = await self._ask()
        if info.epoch != self.epoch:
            raise MillraceError(Reason.EPOCH_CHANGED, "another process answers at its address")
        self.info = info

    async def _ask(self) -> worker_pb2.WorkerInfo:
        info: worker_pb2.WorkerInfo = await self.control.GetInfo(worker_pb2.GetInfoRequest(), timeout=CONNECT_S)
        if info.protocol != WORKER_API:
            text = f"the worker serves version {info.protocol} of the worker API, this router needs {WORKER_API}"
            raise MillraceError(Reason.LAYOUT_MISMATCH, text)
        if info.role not in ROLES:
            raise MillraceError(Reason.INVALID_ARGUMENT, f"the worker has an unknown role ({info.role})")
        if info.replicas > MOST_REPLICAS:
            raise FieldError("replicas", f"of the worker is {info.replicas}; the limit is {MOST_REPLICAS}")
        return info

    async def _watch(self, ready: asyncio.Event) -> None:
        call = self.control.WatchLoad(worker_pb2.WatchLoadRequest())
        while True:
            load = await heard_within(self.watch.silence_s, call.read())
            if load is grpc.aio.EOF:
                raise MillraceError(Reason.WORKER_LOST, "the worker ended its load stream")
            if load.epoch != self.epoch:
                raise MillraceError(Reason.EPOCH_CHANGED, "another process answers at its address")
            check_count("replicas", len(load.replicas), self.info.replicas)
            news = self.watch.reported(load) or self.load is None or load.state != self.load.state
            self.note_load(load)
            if load.state == READY:
                ready.set()
            if news:
                self._on_change()
            else:
                self._on_load()

    async def _hold_link(self, ch: grpc.aio.Channel, ready: asyncio.Event) -> None:
        await ready.wait()
        await self.refresh()
        link = Link(self.role, self.address, self._metrics)
        try:
            async with asyncio.timeout(CONNECT_S):
                me = self._router
                hello = worker_pb2.LinkHello(router_id=me.router_id, epoch=self.epoch, cache_key_id=me.cache_key_id)
                await link.connect(ch, hello)
            self.link, self._pause = link, FIRST_PAUSE_S
            self._on_change()
            link.on_message = lambda: self.watch.moved()
            watch = (self.watch.progress(lambda: link.streams),) if self.role == DECODE else ()
            await _first_end(link.run(), *watch)
        finally:
            self.link = None
            self._on_change()  # before its sub-requests fail: they choose again at once
            link.close(MillraceError(Reason.WORKER_LOST, f"worker {self.address} was lost"))


async def _first_end(*calls: Coroutine[None, None, None]) -> None:
    """Run all until one ends or raises; the others are cancelled. Not a TaskGroup: before Python 3.13 that swallows a
    cancellation that comes while it is ending.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
