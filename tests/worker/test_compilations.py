"""Compilations in the heartbeats of ranks: those after READY are counted."""

from types import SimpleNamespace

import msgspec
from millrace_common.metrics import WORKER, Metrics
from millrace_serve.engine.health.heartbeat import HeartbeatThread
from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.health.rank_watch import RankHeartbeat
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.lifecycle import State
from millrace_serve.worker.messages import FromRank
from prometheus_client import CollectorRegistry

NAME = "millrace_worker_compilations_total"


def test_those_after_ready_are_counted() -> None:
    metrics = Metrics(WORKER, CollectorRegistry())
    worker = SimpleNamespace(_compiled={}, lifecycle=SimpleNamespace(state=State.WARMING), metrics=metrics)

    def value(library: str) -> float | None:
        return metrics.registry.get_sample_value(NAME, {"library": library})

    def hear(rank: int, **compiled: int) -> None:
        Frontend._count_compilations(worker, rank, compiled)  # type: ignore[arg-type]

    hear(0, triton=5)
    hear(1, triton=7)
    assert [value(library) for library in ("triton", "deep_gemm", "flashinfer")] == [0, 0, 0]
    worker.lifecycle.state = State.READY
    hear(0, triton=5)
    hear(1, triton=8, deep_gemm=2)
    hear(1, triton=8, deep_gemm=2)
    hear(0, triton=6)
    assert [value(library) for library in ("triton", "deep_gemm", "flashinfer")] == [2, 2, 0]


def test_heartbeat_carries_them() -> None:
    progress, sent = Progress(), list[RankHeartbeat]()
    with HeartbeatThread(progress, sent.append):
        progress.compiled = lambda: {"triton": 3}
        with progress.busy("the compilation of a kernel"):
            pass
    assert sent[0].compiled == {} and sent[2].compiled == {"triton": 3}
    message = FromRank(1, sent[2])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromRank) == message
