"""The bench of stepping together: the work of a step by counts, and its rows, measured on few ranks."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from millrace_bench import stepping
from millrace_serve.engine.lockstep.links import RankConnection
from millrace_serve.engine.lockstep.replicas import HEADER, VECTOR

WARM_STEPS, STEPS = 10, 30


def counted(replicas: int, hosts: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Messages and bytes of all ranks, from the first word of their joining on."""
    calls: Counter[str] = Counter()
    send, receive = RankConnection.send, RankConnection.receive

    def count_send(link: RankConnection, data: bytes) -> None:
        calls.update(send=1, bytes=len(data))
        send(link, data)

    def count_receive(link: RankConnection, nbytes: int) -> bytes:
        calls["receive"] += 1
        return receive(link, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(RankConnection, "send", count_send)
        patch.setattr(RankConnection, "receive", count_receive)
        stepping.alone(replicas, hosts, steps)
    return calls


@pytest.mark.parametrize(("replicas", "hosts"), [(2, 1), (8, 1), (8, 2), (72, 9)])
def test_the_work_of_a_step_is_counted(replicas: int, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`alone_path_us` is the time of this work: a member tells its node leader, which tells every other one and hears
    from it, and tells its members. The difference of two runs is that of their steps, without the joining.
    """
    few, many = (counted(replicas, hosts, steps, monkeypatch) for steps in (WARM_STEPS, STEPS))
    between, members = hosts * (hosts - 1), replicas - hosts
    messages = between + 2 * members
    step = {"send": messages, "receive": messages, "bytes": messages * HEADER.size}
    step["bytes"] += (between * replicas // hosts + members + members * replicas) * VECTOR.size
    assert {name: many[name] - few[name] for name in step} == {
        name: (STEPS - WARM_STEPS) * count for name, count in step.items()
    }


@pytest.mark.long
def test_rows_of_few_ranks() -> None:
    """In a process of its own, because it forks."""
    few = ["--agreements", "2/1", "8/2", "--groups", "2", "--steps", "30"]
    command = [sys.executable, "-m", "millrace_bench.stepping", *few]
    record = json.loads(subprocess.check_output(command).splitlines()[-1])
    assert record["config"].keys() == {"steps", "load_average_before", "load_average_after"}
    rows = record["results"]["rows"]
    assert [(row["kind"], row.get("over")) for row in rows] == [
        *[("agreement", "sockets"), ("agreement", "gloo"), ("wake", None)] * 2,
        *[("batch", "sockets"), ("batch", "gloo")],
    ]
    ours = rows[3]
    assert (ours["replicas"], ours["hosts"], ours["steps"]) == (8, 2, 40)
    assert ours["alone_path_us"] > ours["alone_node_leader_us"] > ours["alone_member_us"] > 0
    assert all(row["wall_us"] > 0 for row in rows)
