"""Ranks that meet over connections: they hear the same, sleep, wake, and name who is missing."""

import select
import socket
import threading

import pytest
from engine.joined import Ranks, join_all, step, together
from millrace_serve.engine.lockstep import links
from millrace_serve.engine.lockstep.links import HELLO, RankConnection, RankListener, RankLost, connect
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.replicas import ReplicaState
from millrace_serve.engine.schedule.plan import Plan
from millrace_testing import HANG_S

TOKEN = bytes(range(16))


@pytest.mark.parametrize(
    ("tp", "hosts"),
    [
        *((1, "aa"), (1, "aaaaaaaa"), (1, "abc"), (1, "aabbcc")),
        *((4, "aaaa"), (2, "ab"), (2, "aabbcc"), (2, "abba"), (3, "aaabbbaab")),
    ],
)
def test_all_hear_the_same(tp: int, hosts: str) -> None:
    """Also with replicas that lie on two hosts, and batches that no buffer holds."""
    sizes = (1, 1000, links.LOCAL_BUFFER, 5 * links.LOCAL_BUFFER + 7)
    wanted = [
        [ReplicaState(leader, count, 7 * leader, 0, -count) for leader in range(0, len(hosts), tp)]
        for count in range(60)
    ]
    batches = [bytes([count]) * sizes[count % len(sizes)] for count in range(60)]

    def run(rank: int, lockstep: Lockstep) -> None:
        for count in range(60):
            said, data = step(lockstep, ReplicaState(rank, count, 7 * rank, 0, -count), batches[count])
            assert said == (wanted[count] if rank % tp == 0 and len(hosts) > tp else [])
            assert data == (batches[count] if rank % tp else b"")

    ranks = join_all(tp, hosts)
    together([lambda rank=rank, one=one: run(rank, one) for rank, one in enumerate(ranks)])
    together([one.close if rank % tp == 0 else lambda it=one: it.follow(None, len) for rank, one in enumerate(ranks)])


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aabb"])
def test_replicas_without_work_sleep_until_one_calls(hosts: str) -> None:
    ranks = join_all(1, hosts)
    together([lambda one=one: one.agree(Plan([], [], wants_turn=True), False) for one in ranks])
    together([lambda one=one: one.agree(None, False) for one in ranks])
    assert not any(one.due() for one in ranks)
    assert all(one.agree(None, False).num_decode == (0,) for one in ranks), "nobody met"
    for caller in (0, len(hosts) - 1):
        others = [one for rank, one in enumerate(ranks) if rank != caller]
        answer: list[bool] = []
        thread = threading.Thread(target=lambda: answer.append(ranks[caller].agree(None, True).last))  # noqa: B023
        thread.start()
        woken = together([lambda one=one: _sleep_and_agree(one) for one in others])
        thread.join(HANG_S)
        assert answer == [True] and woken == [True] * len(others)
        together([lambda one=one: one.agree(None, False) for one in ranks])


def _sleep_and_agree(one: Lockstep) -> bool:
    while not one.due():
        assert select.select(one.fds, (), (), HANG_S)[0], "nothing woke it"
    return one.agree(None, False).last


@pytest.mark.parametrize(
    ("tp", "hosts", "victim"),
    [(1, "aaa", 0), (1, "aabb", 3), (2, "aa", 1), (2, "ab", 0)],
)
def test_killed_rank_is_named_by_every_other(tp: int, hosts: str, victim: int) -> None:
    with Ranks(tp, hosts) as ranks:
        ranks.kill(victim)
        for rank in set(range(len(hosts))) - {victim}:
            assert ranks.lost(rank).startswith(f"rank {victim} has ended")


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1"])
def test_strangers_are_refused(address: str) -> None:
    listener = RankListener(address)
    for hello in (HELLO.pack(bytes(16), 1), HELLO.pack(TOKEN, 9), HELLO.pack(TOKEN, 1)[:-1], b""):
        with links._dial(listener.address) as stranger:
            stranger.sendall(hello)
    link = connect(listener.address, TOKEN, 1, 0)
    [other] = listener.accept(TOKEN, [1])
    link.send(b"hello")
    assert other.rank == 1 and other.receive(5) == b"hello"
    for each in (listener, link, other):
        each.close()


def test_who_comes_late_hears_which_rank_was_lost() -> None:
    """Its node leader has said so, and has ended itself."""
    node_leader, victim, late = join_all(1, "aaa")
    victim.close()
    for one in (node_leader, late):
        with pytest.raises(RankLost, match=r"^rank 1 has ended"):
            one.agree(None, True)
        one.close()


def test_message_that_is_cut_short_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    link = RankConnection(3, ours)
    theirs.sendall(b"half")
    theirs.close()
    with pytest.raises(RankLost, match=r"^rank 3 has ended"):
        link.receive(8)
    link.close()
