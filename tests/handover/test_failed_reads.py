"""When a worker takes its transport for broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.handover.failed_reads import LIMIT, FailedReads

ALONE = 7


class Worker:
    def __init__(self) -> None:
        self.left: list[str] = []
        self.reads = FailedReads("reads", ALONE, self.left.append)

    def fail(self, *peers: str) -> None:
        """One after the other."""
        for peer in peers:
            self.reads.failed(peer, self.reads.total, "no route")


@pytest.mark.parametrize(
    ("peers", "left"),
    [
        ("ab" * (LIMIT // 2), True),
        ("ab" * (LIMIT // 2 - 1) + "a", False),
        ("a" * (ALONE), True),
        ("a" * (ALONE - 1), False),
        ("a" * (ALONE - 1) + "b", True),
    ],
)
def test_reads_in_a_row_that_fail_end_the_worker(peers: str, left: bool) -> None:
    worker = Worker()
    worker.fail(*peers)
    assert worker.left == ([f"reads failed {len(peers)} times in a row, at last with: no route"] if left else [])


def test_good_read_begins_anew() -> None:
    worker = Worker()
    for _ in range(5):
        worker.fail(*"ab" * (LIMIT // 2 - 1))
        worker.reads.succeeded()
        worker.fail(*"a" * (ALONE - 1))
        worker.reads.succeeded()
    assert worker.left == []


@given(st.lists(st.sampled_from("abc"), max_size=100))
def test_reads_that_fail_together_count_as_one(peers: list[str]) -> None:
    """A peer that dies ends all of its reads at once."""
    worker = Worker()
    before = worker.reads.total
    for peer in peers:
        worker.reads.failed(peer, before, "endpoint lost")
    assert worker.reads.total == before + bool(peers) and worker.left == []
