"""Random orders of every event, on tiny pools, with and without overlap and drafts; the oracle has what must come out.

Pages are poisoned and carry canaries, so a page that is reused too early or shared by mistake fails a request that no
rule corrupted, and that is an assertion here.
"""

import msgspec
from engine.harness import SETTINGS, TINY, Driver, fill_pages, first_output, request
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import (
    Abort,
    Failure,
    FinishReason,
    FlushCache,
    KvArrived,
    KvFailed,
    KvLate,
    KvOffered,
    LeaseEnded,
    Request,
    RequestId,
    Route,
    ServePrefix,
)
from millrace_serve.engine.schedule.sequence import KvWriter
from millrace_serve.engine.schedule.served_pages import SERVED_SHARE
from millrace_testing.examples import examples
from millrace_testing.oracle import oracle_outputs

PREFIXES = ([20] * 12, [20] * 4 + [30] * 8, [40, 41, 42])
EXPECTED_FAILURES = {"DEADLINE_EXCEEDED", "CONTEXT_TOO_LONG", "OVERLOADED", "TRANSFER_FAILED", "INVALID_ARGUMENT"}

prompts = st.builds(
    lambda prefix, cut, tail: (prefix[:cut] + tail) or [50],
    st.sampled_from(PREFIXES),
    st.integers(0, 12),
    st.lists(st.integers(16, 25), max_size=8),
)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "stop_token_ids": st.sampled_from([(), tuple(range(16, 40))]),
    }
)
timeouts = st.sampled_from([None, None, None, 3.0, 10.0])


class Machine(RuleBasedStateMachine):
    role: Role

    @initialize(
        overlap=st.booleans(),
        prefix_cache=st.booleans(),
        num_pages=st.integers(6, 16),
        max_running=st.integers(1, 4),
        max_prefill_tokens=st.integers(1, 12),
        context_parallel_tokens=st.sampled_from([0, 0, 1, 5, 9]),
        max_held_pages=st.sampled_from([None, 4]),
        draft_tokens=st.integers(0, 3),
        draft_batches=st.sampled_from([(9, 9, 9), (3, 2, 1), (2, 0, 0)]),
        acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        host_pages=st.sampled_from([0, 2, 50]),
    )
    def start(self, draft_tokens: int, acceptance: float, host_pages: int, **config: object) -> None:
        config["draft_tokens"] = draft_tokens
        drafts = SETTINGS.model_copy(update={"acceptance": acceptance})
        host_pages *= bool(config["prefix_cache"])
        self.driver = Driver(self.role, drafts, max_waiting=5, host_pages=host_pages, **config)
        self.rooms = 0
        self.ended_leases: set[RequestId] = set()
        self.corrupted: set[RequestId] = set()
        self.num_prefix_fetches = 0
        self.repaid: set[RequestId] = set()
        self.over: set[RequestId] = set()  # prefix fetches to the engine
        self.offered: set[RequestId] = set()

    @rule(
        data=st.data(),
        tokens=prompts,
        prior=st.sampled_from([0, 0, 0, 2]),
        sampling=params,
        priority=st.integers(0, 2),
        timeout=timeouts,
        fetches_prefix=st.booleans(),
        ttft_limit_s=st.sampled_from([0.0, 0.1, 4.0]),
    )
    def submit(
        self,
        data: st.DataObject,
        tokens: list[int],
        prior: int,
        sampling: dict,
        priority: int,
        timeout,
        fetches_prefix: bool,
        ttft_limit_s: float,
    ) -> None:
        route = data.draw(st.sampled_from(self.role.routes))
        made = self.make(route, tokens, prior, sampling, priority, timeout)
        fetches = fetches_prefix and route is Route.EXPORT
        self.driver.submit(msgspec.structs.replace(made, fetches_prefix=fetches, ttft_limit_s=ttft_limit_s))

    def make(self, route: Route, tokens: list[int], prior: int, sampling: dict, priority: int, timeout) -> Request:
        self.rooms += 1
        outputs = oracle_outputs(tokens, request(0, tokens, **sampling).sampling, SETTINGS)
        prior = min(prior, len(outputs) - 1)
        ids = tokens + outputs[:prior]
        return request(self.rooms, ids, route, prior=prior, priority=priority, timeout_s=timeout, **sampling)

    def open_ids(self, *among: RequestId) -> list[RequestId]:
        return sorted(id for id in (among or self.driver.requests) if id not in self.driver.finish)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.driver.requests:
            self.driver.tell(Abort(data.draw(st.sampled_from(sorted(self.driver.requests)))))

    @rule(seconds=st.sampled_from([0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.driver.clock.now += seconds

    @rule()
    def flush(self) -> None:
        self.driver.tell(FlushCache())

    @rule(tokens=prompts)
    def serve_prefix(self, tokens: list[int]) -> None:
        self.num_prefix_fetches += 1
        size = self.driver.config.page_size
        blocks = page_hashes(tokens[: len(tokens) // size * size], size)
        self.driver.tell(ServePrefix(RequestId(0, self.num_prefix_fetches), blocks))

    @precondition(lambda self: self.served_pages())
    @rule(data=st.data())
    def repay(self, data: st.DataObject) -> None:
        self.end(self.repaid, data.draw(st.sampled_from(self.served_pages())))

    def served_pages(self) -> list[RequestId]:
        return sorted(set(self.driver.served) - self.repaid) if hasattr(self, "driver") else []

    def end(self, ended: set[RequestId], id: RequestId) -> None:
        """Twice, of which the second time must change nothing."""
        ended.add(id)
        self.driver.tell(LeaseEnded(id))
        self.driver.tell(LeaseEnded(id))

    @invariant()
    def served_pages_keep_their_content_and_are_bounded(self) -> None:
        served = [self.driver.served[id] for id in self.served_pages()]
        for part in served:
            words = self.driver.engine.pool.read_canaries(part.page_ids)
            found = [row[:-1].tobytes() for row in words]
            assert found == part.fingerprints and set(words[:, -1].tolist()) <= {4}
        if served:
            assert sum(len(part.page_ids) for part in served) <= SERVED_SHARE * self.driver.cache.pool.total

    @invariant()
    def failures_have_a_cause(self) -> None:
        if not hasattr(self, "driver"):
            return
        for id, output in self.driver.finish.items():
            if output.error is not None and output.error.reason not in EXPECTED_FAILURES:
                assert id in self.corrupted or id in self.ended_leases, output.error
            if id in self.corrupted - self.driver.preempted and output.error is None:
                assert output.finish is FinishReason.ABORT

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        imports = [id for id in self.driver.requests if self.imports(id)]
        if imports:
            self.driver.tell(KvOffered(data.draw(st.sampled_from(imports))))

    @precondition(lambda self: self.in_transfer())
    @rule(data=st.data(), corrupt=st.sampled_from([False] * 7 + [True]))
    def arrive(self, data: st.DataObject, corrupt: bool) -> None:
        id = data.draw(st.sampled_from(self.in_transfer()))
        self.deliver(id, corrupt)

    @precondition(lambda self: self.in_transfer())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.in_transfer()))
        del self.driver.reserved[id]
        self.driver.tell(KvFailed(id, Failure("TRANSFER_FAILED", "as the test wants it")))

    @precondition(lambda self: self.unread())
    @rule(data=st.data())
    def end_before_it_is_read(self, data: st.DataObject) -> None:
        """The exporter failed, or its first token was the last one: there is nothing to read."""
        id = data.draw(st.sampled_from(self.unread()))
        first = first_output(self.driver, id)
        if first.finish is None:
            self.driver.tell(KvFailed(id, Failure("TRANSFER_FAILED", "as the test wants it")))
        else:
            self.driver.arrived[id] = first.tokens[0].token_id
            self.driver.tell(KvArrived(id, first))

    def unread(self) -> list[RequestId]:
        """Imports for which no pages were reserved; the engine may have given up on them."""
        if not hasattr(self, "driver"):
            return []
        return sorted(id for id, seq in self.driver.here.live.items() if seq.kv is KvWriter.AWAITED)

    def in_transfer(self) -> list[RequestId]:
        """The importer goes on with a transfer, or says that it is over, even after the request has ended."""
        return [id for id in sorted(self.driver.reserved) if self.imports(id)] if hasattr(self, "driver") else []

    def imports(self, id: RequestId) -> bool:
        return self.driver.requests[id].route is Route.IMPORT

    def deliver(self, id: RequestId, corrupt: bool = False) -> None:
        reserved = self.driver.reserved.pop(id)
        tokens = self.driver.requests[id].token_ids
        first = first_output(self.driver, id)
        if corrupt and reserved.num_cached_pages < len(reserved.page_ids) and first.finish is None:
            tokens = [*tokens[:-1], tokens[-1] + 1]
            self.corrupted.add(id)
        fill_pages(self.driver, reserved.page_ids, tokens, reserved.num_cached_pages)
        self.driver.arrived[id] = first.tokens[0].token_id
        self.driver.tell(KvArrived(id, first))
        # A second, late message of the same transfer changes nothing.
        self.driver.tell(KvFailed(id, Failure("TRANSFER_FAILED", "late")) if corrupt else KvOffered(id))

    def fetchers(self) -> list[RequestId]:
        """Requests whose prefix fetch is not over; the engine may have given up on some."""
        if not hasattr(self, "driver"):
            return []
        return sorted(id for id, r in self.driver.requests.items() if r.fetches_prefix and id not in self.over)

    @precondition(lambda self: set(self.fetchers()) - self.offered)
    @rule(data=st.data(), num_pages=st.integers(1, 5))
    def offer_prefix_fetch(self, data: st.DataObject, num_pages: int) -> None:
        id = data.draw(st.sampled_from(sorted(set(self.fetchers()) - self.offered)))
        self.offered.add(id)
        if most := (len(self.driver.requests[id].token_ids) - 1) // 4:
            self.driver.tell(KvOffered(id, min(num_pages, most)))

    @precondition(lambda self: set(self.fetchers()) & set(self.driver.reserved))
    @rule(data=st.data(), corrupt=st.sampled_from([False] * 7 + [True]))
    def prefix_fetch_arrives(self, data: st.DataObject, corrupt: bool) -> None:
        id = data.draw(st.sampled_from(sorted(set(self.fetchers()) & set(self.driver.reserved))))
        self.over.add(id)
        reserved = self.driver.reserved[id]
        if reserved.num_cached_pages < len(reserved.page_ids):
            tokens = self.driver.requests[id].token_ids[: 4 * len(reserved.page_ids)]
            if corrupt:
                tokens = [*tokens[:-1], tokens[-1] + 1]
                self.corrupted.add(id)
            fill_pages(self.driver, reserved.page_ids, tokens, reserved.num_cached_pages)
        self.driver.tell(KvArrived(id))

    @precondition(lambda self: self.fetchers())
    @rule(data=st.data(), late=st.booleans(), steps=st.integers(0, 3))
    def lose(self, data: st.DataObject, late: bool, steps: int) -> None:
        """A prefix fetch fails, perhaps while reads are in flight that write long after."""
        id = data.draw(st.sampled_from(self.fetchers()))
        reserved = self.driver.reserved.get(id)
        if late and reserved is not None and reserved.num_cached_pages < len(reserved.page_ids):
            self.driver.tell(KvLate(id))
            self.step(steps)
            fill_pages(self.driver, reserved.page_ids, [7] * 4 * len(reserved.page_ids), reserved.num_cached_pages)
        self.over.add(id)
        self.driver.tell(KvFailed(id, Failure("STALLED", "as the test wants it")))

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def lease_ends(self, data: st.DataObject) -> None:
        self.end(self.ended_leases, data.draw(st.sampled_from(self.leases())))

    @invariant()
    def published_pages_keep_their_content(self) -> None:
        for id in set(self.leases()) - self.corrupted:  # a request on corrupted pages fails a step later
            driver, parts = self.driver, self.driver.parts[id]
            size, tokens = driver.config.page_size, driver.requests[id].token_ids
            assert parts[-1].num_tokens <= len(tokens)
            covered = tokens[: parts[-1].num_tokens]
            hashes = [value for part in parts for value in part.fingerprints]
            assert hashes == page_hashes(covered, size)
            pages = [page for part in parts for page in part.page_ids]
            words = driver.engine.pool.read_canaries(pages)
            assert [row[:-1].tobytes() for row in words] == hashes
            if parts[-1].last:
                assert covered == tokens and parts[-1].first is not None
                assert parts[-1].first.tokens[0].token_id == driver.expected(id)[driver.requests[id].num_prior_outputs]

    def leases(self) -> list[RequestId]:
        return sorted(set(self.driver.parts) - self.ended_leases) if hasattr(self, "driver") else []

    def settle_everything(self) -> None:
        for id in self.fetchers():
            self.driver.tell(KvFailed(id, Failure("WORKER_LOST", "the end")))
        for _ in range(len(self.driver.requests) + 1):
            self.driver.run()
            for id in self.in_transfer():
                self.deliver(id)
            for id in self.open_ids():
                self.driver.tell(KvOffered(id))
            for id in self.leases():
                self.end(self.ended_leases, id)
        self.driver.run()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.settle_everything()
        for id in self.served_pages():
            self.end(self.repaid, id)
        self.settle_everything()  # what waited for pages that were served
        self.failures_have_a_cause()
        self.driver.check_whole()


PROFILE = examples(25, stateful_step_count=40, suppress_health_check=[HealthCheck.filter_too_much])


def machine(of: Role) -> type:
    case: type = type(f"{of.name.title()}Machine", (Machine,), {"role": of}).TestCase  # type: ignore[attr-defined]
    case.settings = PROFILE  # type: ignore[attr-defined]
    return case


TestPrefill, TestDecode, TestFlexible = machine(Role.PREFILL), machine(Role.DECODE), machine(Role.FLEXIBLE)

assert TINY["page_size"] == 4  # the prefixes above are multiples of it
