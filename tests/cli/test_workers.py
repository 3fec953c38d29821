"""The table of `millrace workers`."""

import asyncio
import json
from unittest.mock import AsyncMock

import pytest
from millrace.v1 import admin_pb2, worker_pb2
from millrace_cli import workers
from millrace_cli.errors import CommandError
from millrace_rpc.server import Server


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

    monkeypatch.setattr(workers.probe, "listed", AsyncMock(return_value=[worker]))
    monkeypatch.setenv("COLUMNS", "20")
    await workers.show("a:1")
    out = capsys.readouterr().out
    assert worker.address in out and worker.detail in out


WORKERS = [
    admin_pb2.WorkerStatus(
        address=f"millrace-decode-7d9f8c6b5-abcd{i}.millrace-decode:50061", reachable=True, detail=why
    )
    for i, why in enumerate(("", "KV layout differs"))
]


def test_table_is_narrow_and_reasons_stand_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = workers.text(WORKERS, wide=False).splitlines()
    assert all(len(line.removesuffix(one.address)) <= 80 for line, one in zip(lines[1:], WORKERS, strict=False))
    assert lines[-1] == f"{WORKERS[1].address}: KV layout differs" and len(lines) == 4
    assert "accept length" not in lines[0] and "accept length" in workers.text(WORKERS, wide=True)


async def test_json_is_one_object_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(workers.probe, "listed", AsyncMock(return_value=WORKERS))
    await workers.show("a:1", as_json=True)
    shown = [json.loads(line)["address"] for line in capsys.readouterr().out.splitlines()]
    assert shown == [worker.address for worker in WORKERS]


async def test_another_port_is_recognised() -> None:
    server = Server([])
    port = await server.start("127.0.0.1:0")
    http = await asyncio.start_server(answer_http, "127.0.0.1", 0)
    try:
        for number, words in ((port, "is another gRPC port"), (http.sockets[0].getsockname()[1], "speaks HTTP")):
            with pytest.raises(CommandError, match=words):
                await workers.show(f"127.0.0.1:{number}")
    finally:
        http.close()
        await server.stop(0)


async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()
