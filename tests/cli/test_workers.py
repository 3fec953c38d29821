"""The table of `millrace workers`."""

from __future__ import annotations

import pytest
from millrace.v1 import admin_pb2, worker_pb2
from millrace_cli import workers


@pytest.mark.parametrize(
    ("replicas", "shown"),
    [
        ([], ("", "")),
        ([{"running": 2}], ("", "")),
        ([{"drafted": [0, 0], "accepted": [0, 0]}], ("", "")),
        ([{"drafted": [10, 4], "accepted": [8, 1]}], ("64%", "1.90")),
        ([{"drafted": [10, 4], "accepted": [8, 1]}, {}, {"drafted": [6], "accepted": [3]}], ("60%", "1.75")),
    ],
)
def test_drafts_of_all_replicas(replicas: list[dict[str, object]], shown: tuple[str, str]) -> None:
    load = worker_pb2.LoadSnapshot(replicas=[worker_pb2.ReplicaLoad(**replica) for replica in replicas])
    by_column = workers.row(admin_pb2.WorkerStatus(address="d:1", reachable=True, load=load))
    assert (by_column["drafts accepted"], by_column["accept length"]) == shown


@pytest.mark.parametrize(
    ("replica", "shown"),
    [
        ({"running": 2}, ""),
        ({"expert_imbalance": [1.5, 1.25]}, "1.38, worst 1.50"),
        ({"expert_imbalance": [1.5, 1.25], "experts_moved_at": 940.0}, "1.38, worst 1.50, moved 60 s ago"),
    ],
)
def test_balance_of_experts(replica: dict[str, object], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.time, "time", lambda: 1000.0)
    load = worker_pb2.LoadSnapshot(replicas=[worker_pb2.ReplicaLoad(**replica)] * 2)
    by_column = workers.row(admin_pb2.WorkerStatus(address="d:1", reachable=True, load=load))
    assert by_column["expert imbalance"] == shown


async def test_texts_of_others_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are no markup: an address of IPv6 would vanish, and a path in brackets would end the command."""
    worker = admin_pb2.WorkerStatus(address="[fd00::12]:7000", detail="cannot load [/models/x]")

    async def found(address: str, identity: object) -> list[admin_pb2.WorkerStatus]:
        return [worker]

    monkeypatch.setattr(workers.probe, "workers", found)
    monkeypatch.setenv("COLUMNS", "400")  # one line
    await workers.show("a:1")
    out = capsys.readouterr().out
    assert worker.address in out and worker.detail in out
