"""Two flexible engines that read each other's pages: neither waits for the other for ever, where half of the pool holds
any request.
"""

from engine.harness import Driver, fill_pages, first_output, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Abort, KvArrived, KvFailed, KvOffered, LeaseEnded, RequestId, Route, ServePrefix
from millrace_testing.examples import examples


class Pair:
    """Both engines, and the transfers between them: an import offers itself with the first part of its export, and the
    lease ends when the import has everything, never before.
    """

    def __init__(self, **config: object) -> None:
        self.engines = [Driver(Role.FLEXIBLE, max_running=4, checks=(), **config) for _ in range(2)]
        self.offered: set[RequestId] = set()
        self.ended: set[RequestId] = set()

    def submit(self, room: int, length: int, way: int, *, local: bool, priority: int, **sampling: object) -> None:
        routes = {way: Route.LOCAL} if local else {1 - way: Route.EXPORT, way: Route.IMPORT}
        for index, route in routes.items():
            tokens = [room % 150 + 20] * length
            self.engines[index].submit(request(room, tokens, route, priority=priority, **sampling))

    def step(self) -> None:
        for index, sink in enumerate(self.engines):
            source = self.engines[1 - index]
            sink.step()
            for id in [id for id, r in sink.requests.items() if r.route is Route.IMPORT and id not in self.ended]:
                self.transfer(sink, source, id)

    def transfer(self, sink: Driver, source: Driver, id: RequestId) -> None:
        parts, reserved = source.parts.get(id, []), sink.reserved.get(id)
        if parts and id not in self.offered:
            self.offered.add(id)
            sink.tell(KvOffered(id))
        if not (parts and parts[-1].last):
            return
        first = first_output(source, id)
        if first.finish is None:
            if reserved is None:
                return
            fill_pages(sink, reserved.page_ids, sink.requests[id].token_ids, reserved.num_cached_pages)
        self.ended.add(id)
        sink.arrived[id] = first.tokens[0].token_id
        sink.tell(KvArrived(id, first))
        source.tell(LeaseEnded(id))

    @property
    def done(self) -> bool:
        return all(
            id in engine.finish or (r.route is Route.EXPORT and id in self.ended)
            for engine in self.engines
            for id, r in engine.requests.items()
        )


works = st.lists(
    st.tuples(st.integers(1, 18), st.integers(0, 1), st.booleans(), st.integers(0, 1), st.integers(1, 5)),
    min_size=8,
    max_size=40,
)


@examples(30)
@given(works=works, num_pages=st.integers(14, 20), overlap=st.booleans(), prefix_cache=st.booleans())
def test_exchange_ends_without_the_end_of_a_lease(
    works: list[tuple[int, int, bool, int, int]], num_pages: int, overlap: bool, prefix_cache: bool
) -> None:
    pair = Pair(num_pages=num_pages, overlap=overlap, prefix_cache=prefix_cache)
    for room, (length, way, local, priority, outputs) in enumerate(works, 1):
        pair.submit(room, length, way, local=local, priority=priority, max_tokens=outputs)
    for _ in range(200 + 100 * len(works)):
        if pair.done:
            break
        pair.step()
    assert pair.done, [engine.engine.load() for engine in pair.engines]
    for engine in pair.engines:
        engine.run_out()


def test_exports_leave_half_of_the_pool_and_others_pass_them() -> None:
    driver = Driver(Role.FLEXIBLE, num_pages=21, max_running=8, max_prefill_tokens=100)
    for room in (1, 2, 3):
        driver.submit(request(room, [20 + room] * 16, Route.EXPORT))  # 4 pages each, of 10
    driver.submit(request(4, [30] * 16, Route.LOCAL, max_tokens=2), request(5, [31] * 16, Route.IMPORT, max_tokens=2))
    driver.run(KvOffered(RequestId(5, 0)))
    load = driver.engine.load()
    assert (load.exporting, load.pages_published, load.waiting, load.capacity) == (2, 8, 1, 0)
    assert RequestId(4, 0) in driver.finish and RequestId(5, 0) in driver.reserved
    for room in (1, 2):
        driver.tell(LeaseEnded(RequestId(room, 0)))
    driver.run()
    assert driver.engine.load().exporting == 1 and driver.engine.load().capacity > 0
    driver.tell(LeaseEnded(RequestId(3, 0)))
    driver.tell(Abort(RequestId(5, 0)))
    driver.tell(KvFailed(RequestId(5, 0), None))  # type: ignore[arg-type]
    driver.run_out()


def test_an_export_that_needs_most_of_the_pool_waits_no_longer_than_the_leases_before_it() -> None:
    """Others fetch a cached prefix again and again, each before the one before has it."""
    sizes = {"num_pages": 21, "max_running": 8, "max_prefill_tokens": 100, "max_model_len": 64}
    driver, tokens = Driver(Role.FLEXIBLE, **sizes), [20] * 16
    driver.run(request(1, tokens, max_tokens=1))
    blocks = page_hashes(tokens[:12], 4)
    driver.tell(ServePrefix(RequestId(2, 0), blocks))
    driver.submit(request(3, [21] * 48, Route.EXPORT))  # 12 pages of 20
    for room in range(4, 8):
        driver.run()
        driver.tell(ServePrefix(RequestId(room, 0), blocks))
        driver.tell(LeaseEnded(RequestId(room - 2 if room == 4 else room - 1, 0)))
    driver.run()
    assert RequestId(3, 0) in driver.parts
    for room in range(2, 8):
        driver.tell(LeaseEnded(RequestId(room, 0)))
    driver.run_out()


def test_streams_that_need_pages_never_take_those_of_exports() -> None:
    """The export came last and has the lowest priority; what is preempted all the same is the stream before it."""
    driver = Driver(Role.FLEXIBLE, num_pages=10, max_running=4, max_prefill_tokens=3, prefix_cache=False)
    for room in (1, 2):
        driver.submit(request(room, [20 + room] * 3, max_tokens=14, priority=2))
    driver.run(request(3, [30] * 15, Route.EXPORT))  # 4 of 9 pages
    assert driver.engine.load().counters["preemptions"] == 1 and driver.parts[RequestId(3, 0)][-1].last
    driver.run_out(LeaseEnded(RequestId(3, 0)))
