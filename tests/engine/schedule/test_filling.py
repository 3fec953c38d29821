"""Leading pages of a running prompt that somebody else writes: what the scheduler does until they are there."""

import pytest
from engine.harness import Driver, fill_pages, request
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Abort, FinishReason, RequestId, Route
from millrace_serve.engine.schedule.sequence import Phase, Sequence

PROMPT = list(range(20, 34))  # 14 tokens: 3 full pages of 4, and 2 tokens
ROLES = [Role.UNIFIED, Role.PREFILL]


class Filling(Driver):
    """Every prompt is filled, and the test says when that is over."""

    def __init__(self, role: Role, **config: object) -> None:
        super().__init__(role, **config)
        self.route = Route.EXPORT if role is Role.PREFILL else Route.LOCAL
        self.filling: list[Sequence] = []
        run = self.scheduler._run

        def run_and_fill(seq: Sequence, num_offered: int = 0) -> None:
            run(seq)
            self.scheduler._fill(seq)
            self.filling.append(seq)

        self.scheduler._run = run_and_fill  # type: ignore[method-assign]

    def start(self, room: int = 1, **sampling: object) -> RequestId:
        self.run(request(room, PROMPT, self.route, **sampling))
        assert [seq.id.room for seq in self.filling][-1] == room
        return RequestId(room, 0)

    def end(self, num_pages: int, tokens: list[int] = PROMPT) -> Sequence:
        """The oldest fill is over: its first pages have the KV of `tokens`."""
        seq = self.filling.pop(0)
        if num_pages:
            fill_pages(self, seq.pages[:num_pages], tokens[: num_pages * self.config.page_size], 0)
        self.scheduler._filled(seq, num_pages)
        self.engine._stale = True
        return seq


@pytest.fixture(params=[True, False], ids=["overlap", "synchronous"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("num_pages", [0, 1, 3])
def test_rest_is_computed_from_where_the_fill_ended(role, num_pages, overlap):
    driver = Filling(role, overlap=overlap)
    id = driver.start()
    assert not driver.engine.has_work() and driver.engine.wait_s() is None  # a message ends the fill
    seq = driver.end(num_pages)
    assert seq.num_computed == 4 * num_pages
    driver.run()
    first = driver.parts[id][-1].first if role is Role.PREFILL else None
    assert first is not None or driver.finish[id].finish is FinishReason.LENGTH
    assert driver.engine.load().counters["cached_tokens"] == seq.found.cached_tokens == 4 * num_pages
    driver.finish_all()


@pytest.mark.parametrize("role", ROLES)
def test_others_run_while_one_is_filled(role, overlap):
    driver = Filling(role, overlap=overlap)
    slow, quick = driver.start(1), driver.start(2)
    driver.filling.reverse()
    driver.end(2)
    driver.run()
    assert quick in driver.finish or driver.parts[quick][-1].last
    assert slow not in driver.finish and driver.here.live[slow].phase is Phase.RUNNING
    driver.end(1)
    driver.finish_all()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("why", ["abort", "deadline"])
def test_pages_are_kept_until_the_fill_of_a_sequence_that_left_is_over(role, why):
    driver = Filling(role)
    driver.run(request(1, PROMPT, driver.route, timeout_s=2.0))
    id = RequestId(1, 0)
    if why == "abort":
        driver.tell(Abort(id))
    else:
        driver.clock.now = 3.0
    driver.step()
    driver.end_leases()
    assert driver.finish[id].finish is (FinishReason.ABORT if why == "abort" else FinishReason.ERROR)
    assert driver.engine.load().pages_running == 4 and id in driver.here.live
    driver.end(3)
    driver.finish_all()


def test_preempted_sequence_is_filled_again(overlap):
    driver = Filling(Role.UNIFIED, overlap=overlap, num_pages=10)
    driver.run(request(1, [40] * 7, max_tokens=20))
    driver.end(0, [40] * 7)
    driver.run(request(2, PROMPT, max_tokens=4))  # 4 pages of 9, and the first sequence will need 7
    seq = driver.filling[0]
    assert seq.phase is Phase.WAITING and seq in driver.scheduler.leaving and seq.pages
    driver.end(3)
    driver.run()
    driver.end(3)
    counters = driver.engine.load().counters
    assert counters["preemptions"] == 1
    assert (counters["prompt_tokens"], counters["cached_tokens"]) == (7 + 14, 12), "each counts once"
    driver.finish_all()
    assert all(output.finish is FinishReason.LENGTH for output in driver.finish.values())


@pytest.mark.parametrize("role", ROLES)
def test_filled_pages_are_shared_when_a_step_has_used_them(role, overlap):
    driver = Filling(role, overlap=overlap)
    id = driver.start(1)
    driver.end(3)
    driver.tell(Abort(id))
    driver.end_leases()
    assert driver.engine.load().pages_cached == 0
    driver.start(2)
    driver.end(3)
    driver.run()
    assert driver.cache._tree.match(PROMPT, 3, b"")
    driver.finish_all()


@pytest.mark.parametrize("role", ROLES)
def test_wrong_pages_fail_their_request_and_are_not_shared(role, overlap):
    driver = Filling(role, overlap=overlap)
    id = driver.start()
    driver.end(3, [77] * 12)
    driver.run()
    assert driver.finish[id].error.reason == "KV_MISMATCH"
    assert driver.engine.load().pages_cached == 0
    driver.finish_all()
