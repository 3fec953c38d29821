"""The counts of engines as Prometheus sees them: growth since the last scrape, of every replica by itself."""

from millrace.v1 import worker_pb2
from millrace_common.metrics import WORKER, Metrics
from millrace_serve.engine.core import Load
from millrace_serve.worker.frontend.load import LoadBoard
from prometheus_client import CollectorRegistry


def test_routers_are_told_that_a_rank_is_busy() -> None:
    doing = [True, False]
    board = LoadBoard(1, "e", lambda: worker_pb2.LoadSnapshot(busy=doing.pop(0)))
    assert [board.snapshot().busy for _ in range(2)] == [True, False]


def test_counts_follow_the_engines() -> None:
    board = LoadBoard(2, "e", worker_pb2.LoadSnapshot)
    metrics = Metrics(WORKER, CollectorRegistry())
    for drafted, accepted, steps in (((), (), 3), ((10, 4), (8, 1), 9), ((12, 5), (9, 2), 11)):
        counters = {"steps": steps, "disk_pages/load": 10 * steps}
        board.update(1, Load(drafted=drafted, accepted=accepted, counters=counters))
        board.report(metrics)
        board.report(metrics)  # nothing new

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("millrace_engine_total", replica="1", what="steps") == 11
    assert value("millrace_engine_total", replica="0", what="steps") is None
    assert value("millrace_disk_pages_total", replica="1", way="load") == 110
    for position, drafted, accepted in (("1", 12, 9), ("2", 5, 2)):
        assert value("millrace_draft_tokens_total", replica="1", position=position) == drafted
        assert value("millrace_draft_tokens_accepted_total", replica="1", position=position) == accepted
        assert value("millrace_draft_tokens_total", replica="0", position=position) is None, "it has never drafted"


def test_balance_of_experts_is_of_the_whole_worker() -> None:
    board = LoadBoard(2, "e", worker_pb2.LoadSnapshot)
    metrics = Metrics(WORKER, CollectorRegistry())
    for moves in (3, 7):
        for replica in (0, 1):
            board.update(replica, Load(expert_imbalance=(1.5, 1.25), expert_moves=moves))
        board.report(metrics)
    assert metrics.registry.get_sample_value("millrace_expert_imbalance") == 1.375
    assert metrics.registry.get_sample_value("millrace_expert_moves_total") == 7
