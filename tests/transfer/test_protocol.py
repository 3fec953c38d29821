"""The whole protocol in one thread, in random orders: leases, import, a misbehaving transport, pages that are reused.

The exporter overwrites a prompt's pages the moment its lease ends; the importer poisons its own pages the moment its
import is over. So a Done with wrong bytes, or a read that lands after Over, is seen at once.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from millrace_serve.engine.core import Failure, KvChunk, RequestId, SequenceOutput, TokenOutput
from millrace_serve.transfer.base import ReadOp, ReadState, TransferError
from millrace_serve.transfer.importer import Action, AskRelease, AskReserve, Done, KvImport, Over
from millrace_serve.transfer.lease import LeaseEnd, LeaseTable
from millrace_serve.transfer.messages import ReadPages
from millrace_testing.examples import examples
from millrace_testing.faulty_transfer import Fault, FaultPlan, FaultySink
from millrace_testing.local_transfer import LocalFabric, LocalSink, LocalSource
from transfer.pools import Pool

NUM_PAGES, PAGE_BYTES, REUSED, FREED = 6, 64, 0xEE, 0xDD
HASHES = [1000 + i for i in range(NUM_PAGES)]
ID = RequestId(1, 0)
FAULTS = (Fault.DELAY, Fault.REORDER, Fault.DUPLICATE, Fault.STALL, Fault.FAIL, Fault.DROP)


class ProtocolMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000), cached=st.integers(0, NUM_PAGES), order=st.permutations(range(NUM_PAGES)))
    def begin(self, seed: int, cached: int, order: list[int]) -> None:
        self.now = 0.0
        self.theirs, self.ours = Pool(NUM_PAGES, PAGE_BYTES, seed), Pool(NUM_PAGES, PAGE_BYTES)
        self.truth = self.theirs.pages.copy()
        self.src_pages, self.cached = order, cached
        fabric = LocalFabric()
        self.source = LocalSource(fabric, self.theirs.buffer).handle()
        plan = FaultPlan(seed=seed, rates=dict.fromkeys(FAULTS, 0.06), stall_polls=5, max_polls=4)
        self.sink = FaultySink(LocalSink(fabric, self.ours.buffer), self.ours.buffer, plan)
        self.sink.connect(self.source)
        self.leases = LeaseTable(10.0, 300.0, lambda: self.now, self.on_lease_ended)
        self.lease_ends: list[LeaseEnd] = []
        self.machine = KvImport(ID, HASHES)
        self.sent: list[KvChunk] = []
        self.num_published = self.num_delivered = 0
        self.ops: dict[int, ReadOp] = {}
        self.todo: list[Action] = []
        self.end: Action | None = None

    def on_lease_ended(self, id: RequestId, end: LeaseEnd) -> None:
        self.lease_ends.append(end)
        self.theirs.pages[:] = REUSED

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.end is None, f"{action} after {self.end}"
            match action:
                case ReadPages(_, read, src, dst):
                    try:
                        self.ops[read] = self.sink.read(self.source, src, dst)
                    except TransferError as error:
                        self.do(self.machine.on_read_done(read, str(error)))
                case Over():
                    self.end = action
                    self.ours.pages[:] = FREED
                case Done():
                    self.end = action
                    expected = self.truth[self.src_pages]
                    assert np.array_equal(self.ours.pages, expected), "Done, but the pages are wrong"
                case AskReserve() | AskRelease():
                    self.todo.append(action)

    @rule(times=st.integers(1, 6))
    def proceed(self, times: int) -> None:
        """What an undisturbed transfer does next; the other rules disturb it."""
        for _ in range(times):
            if self.todo:
                self.answer()
            elif self.num_delivered < len(self.sent):
                self.num_delivered += 1
                self.do(self.machine.on_chunk(self.sent[self.num_delivered - 1]))
            elif self.num_published < NUM_PAGES:
                self.publish(2)
            else:
                self.poll(1)

    @precondition(lambda self: self.num_published < NUM_PAGES)
    @rule(count=st.integers(0, NUM_PAGES))
    def publish(self, count: int) -> None:
        """Parts without pages too: the first one often has none."""
        start, end = self.num_published, min(self.num_published + count, NUM_PAGES)
        last = end == NUM_PAGES
        first = SequenceOutput(ID, 0, [TokenOutput(5)]) if last else None
        chunk = KvChunk(ID, start, self.src_pages[start:end], HASHES[start:end], 64 * end, last, first)
        if not self.lease_ends:
            self.leases.publish(chunk)
            self.sent.append(chunk)
            self.num_published = end

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Any published chunk, in any order, any number of times."""
        self.do(self.machine.on_chunk(data.draw(st.sampled_from(self.sent))))

    @precondition(lambda self: self.todo)
    @rule()
    def answer(self) -> None:
        match self.todo.pop(0):
            case AskReserve():
                if self.end is None:
                    self.ours.pages[: self.cached] = self.truth[self.src_pages[: self.cached]]
                self.do(self.machine.on_reserved(range(NUM_PAGES), self.cached))
            case AskRelease():
                expired = Failure("KV_EXPIRED", "")
                self.do(
                    self.machine.on_release_confirmed() if self.leases.release(ID) else self.machine.on_abort(expired)
                )

    @rule(times=st.integers(1, 10))
    def poll(self, times: int) -> None:
        for _ in range(times):
            for read, op in list(self.ops.items()):
                if op.poll() is not ReadState.PENDING:
                    del self.ops[read]
                    self.do(self.machine.on_read_done(read, op.error))

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire()

    @rule()
    def heartbeat(self) -> None:
        self.leases.renew(ID)

    @precondition(lambda self: self.ops)
    @rule()
    def give_up_peer(self) -> None:
        self.sink.disconnect(self.source.agent)

    @precondition(lambda self: self.sent)
    @rule()
    def cancel(self) -> None:
        self.do(self.machine.on_abort(Failure("CANCELLED", "")))

    @precondition(lambda self: self.num_published == NUM_PAGES)
    @rule()
    def router_aborts_export(self) -> None:
        self.leases.abort(ID)

    @precondition(lambda self: self.lease_ends)
    @rule()
    def stream_ends(self) -> None:
        self.do(self.machine.on_stream_end())

    @invariant()
    def freed_pages_stay_untouched(self) -> None:
        if isinstance(getattr(self, "end", None), Over):
            assert (self.ours.pages == FREED).all(), "a read landed in pages that were freed"

    @invariant()
    def lease_ends_at_most_once(self) -> None:
        assert len(getattr(self, "lease_ends", [])) <= 1

    def teardown(self) -> None:
        """Everything ends: with the peer gone, the import is over within a few polls."""
        if not hasattr(self, "machine"):
            return
        self.do(self.machine.on_abort(Failure("CANCELLED", "")))
        self.sink.disconnect(self.source.agent)
        self.poll(times=30)
        assert not self.ops and self.end is not None


ProtocolMachine.TestCase.settings = examples(50, stateful_step_count=30)
TestProtocol = ProtocolMachine.TestCase
