"""A KvSink that misbehaves by plan, around any other: for tests of everything above the transport.

Every read is given at most one fault, by its number (`at`) or drawn from the seed (`rates`), so a run repeats exactly.
Time is counted in polls of the read. What a read reports stays true whatever the fault: FAILED and DONE are said only
when the inner read is final or was never posted, so pages are never freed under a copy.
"""

import ctypes
import enum
import random
from collections.abc import Sequence

import msgspec
from millrace_serve.transfer.base import KvSink, MemoryHandle, PageBuffer, ReadOp, ReadState, TransferError


class Fault(enum.StrEnum):
    DELAY = "delay"  # completes 1 to `max_polls` polls late; differing delays reorder completions
    REORDER = "reorder"  # completes only after another read did, or after `max_polls` polls
    DROP = "drop"  # never completes; FAILED once the peer is disconnected or the sink closed
    STALL = "stall"  # posted only after `stall_polls` polls
    DUPLICATE = "duplicate"  # copied twice; final when both copies are
    CORRUPT = "corrupt"  # DONE, but one byte of each page was flipped
    FAIL = "fail"  # FAILED without having been posted
    PEER_DEATH = "peer_death"  # FAILED, and so is every other read of this peer; its agent cannot be connected again


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    at: dict[int, Fault] = {}  # read number, counted from 0 over the sink's life
    rates: dict[Fault, float] = {}  # probability per read, for reads that `at` does not name
    max_polls: int = 8
    stall_polls: int = 1000


class FaultySink(KvSink):
    """`pool` is the inner sink's own pool, in host memory: CORRUPT writes to it."""

    def __init__(self, inner: KvSink, pool: PageBuffer, plan: FaultPlan) -> None:
        assert pool.mem_type == "DRAM", "CORRUPT writes through the CPU"
        self.inner = inner
        self.pool = pool
        self.plan = plan
        self.num_finished = 0  # reads that are final
        self._random = random.Random(plan.seed)
        self._num_reads = 0
        self._dead: set[str] = set()
        self._open: list[_FaultyRead] = []  # not final

    def connect(self, source: MemoryHandle) -> None:
        self._check_alive(source)
        self.inner.connect(source)

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        self._check_alive(source)
        fault = self._next_fault()
        if fault is Fault.PEER_DEATH:
            self._dead.add(source.agent)
            for read in self._open:
                read.give_up(source.agent, "died (injected)")
        read = _FaultyRead(self, fault, source, src_pages, dst_pages, random.Random(self._random.random()))
        self._open.append(read)
        return read

    def disconnect(self, agent: str) -> None:
        self.inner.disconnect(agent)
        for read in self._open:
            if read.fault in (Fault.DROP, Fault.STALL):  # the others run to their end, as of any sink
                read.give_up(agent, "was disconnected")

    def close(self) -> None:
        self.inner.close()
        for read in list(self._open):
            read.give_up(read.source.agent, "is unreachable, the importer was closed")
            read.poll()

    def finished(self, read: "_FaultyRead") -> None:
        self._open.remove(read)
        self.num_finished += 1

    def _check_alive(self, source: MemoryHandle) -> None:
        if source.agent in self._dead:
            raise TransferError(f"{source.agent} died (injected)")

    def _next_fault(self) -> Fault | None:
        number = self._num_reads
        self._num_reads += 1
        draw = self._random.random()  # also when `at` decides: the other reads' faults do not depend on it
        if number in self.plan.at:
            return self.plan.at[number]
        for fault, rate in self.plan.rates.items():
            if draw < rate:
                return fault
            draw -= rate
        return None


class _FaultyRead(ReadOp):
    def __init__(
        self,
        sink: FaultySink,
        fault: Fault | None,
        source: MemoryHandle,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        rng: random.Random,
    ) -> None:
        self.fault = fault
        self.source = source
        self._sink = sink
        self._src_pages = list(src_pages)
        self._dst_pages = list(dst_pages)
        self._random = rng
        self._hold = rng.randint(1, sink.plan.max_polls)  # polls, of DELAY
        self._finished_before = sink.num_finished
        self._polls = 0
        self._given_up = ""  # why it ends as FAILED
        if fault is Fault.FAIL:
            self._given_up = "read failed (injected)"
        elif fault is Fault.PEER_DEATH:
            self._given_up = f"{source.agent} died (injected)"
        self._inner: list[ReadOp] = []
        self._state = ReadState.PENDING
        self.error = ""
        if not self._given_up and fault is not Fault.STALL:
            self._post()

    def give_up(self, agent: str, reason: str) -> None:
        if agent == self.source.agent:
            self._given_up = self._given_up or f"{agent} {reason}"

    def poll(self) -> ReadState:
        if self._state is ReadState.PENDING:
            self._polls += 1
            self._state = self._next_state()
            if self._state is not ReadState.PENDING:
                self._sink.finished(self)
        return self._state

    def _next_state(self) -> ReadState:
        if self.fault is Fault.STALL and not self._inner and not self._given_up:
            if self._polls <= self._sink.plan.stall_polls:
                return ReadState.PENDING
            try:
                self._post()
            except TransferError as error:
                self._given_up = str(error)
        inner = [op.poll() for op in self._inner]
        if ReadState.PENDING in inner:
            return ReadState.PENDING
        failed = self._given_up or next((op.error for op in self._inner if op.error), "")
        if failed:
            self.error = failed
            return ReadState.FAILED
        if self._is_held_back():
            return ReadState.PENDING
        if self.fault is Fault.CORRUPT:
            self._corrupt()
        return ReadState.DONE

    def _is_held_back(self) -> bool:
        if self.fault is Fault.DELAY:
            return self._polls <= self._hold
        if self.fault is Fault.REORDER:
            another_finished = self._sink.num_finished > self._finished_before
            return not another_finished and self._polls <= self._sink.plan.max_polls
        return self.fault is Fault.DROP

    def _post(self) -> None:
        copies = 2 if self.fault is Fault.DUPLICATE else 1
        for _ in range(copies):
            self._inner.append(self._sink.inner.read(self.source, self._src_pages, self._dst_pages))

    def _corrupt(self) -> None:
        pool = self._sink.pool
        for page in self._dst_pages:
            offset = page * pool.page_bytes + self._random.randrange(pool.page_bytes)
            ctypes.c_ubyte.from_address(pool.address + offset).value ^= 0xFF
