"""What every transport promises: NIXL between two processes, and the local one that tests use."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from millrace_serve.transfer.base import MOST_PAGES, ReadState, TransferError
from transfer.pools import POISON, Fabric, Pool, finish


@pytest.fixture(params=["local", "nixl"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    made = Fabric(request.param)
    yield made
    made.close()


def test_pages_arrive_byte_for_byte_and_nothing_else_is_touched(fabric: Fabric) -> None:
    exporter, pool, sink = fabric.linked(80, num_pages=64, page_bytes=1152)
    rng = np.random.default_rng(0)
    for count in (1, 2, 17, 64):
        pool.pages[:] = POISON
        src, dst = rng.permutation(64)[:count].tolist(), rng.permutation(80)[:count].tolist()
        op = sink.read(exporter.handle, src, dst)
        assert finish(op) is ReadState.DONE and op.error == ""
        assert np.array_equal(pool.pages[dst], exporter.pages[src])
        untouched = np.delete(pool.pages, dst, axis=0)
        assert (untouched == POISON).all()


def test_many_reads_in_flight(fabric: Fabric) -> None:
    exporter, pool, sink = fabric.linked(60, num_pages=60)
    src = np.random.default_rng(3).permutation(60)
    ops = [sink.read(exporter.handle, src[i : i + 3].tolist(), list(range(i, i + 3))) for i in range(0, 60, 3)]
    assert [finish(op) for op in reversed(ops)] == [ReadState.DONE] * 20
    assert np.array_equal(pool.pages, exporter.pages[src])


def test_two_exporters(fabric: Fabric) -> None:
    first, second, pool = fabric.exporter(seed=1), fabric.exporter(seed=2), Pool(2, 4096)
    sink = fabric.sink(pool)
    assert first.handle.agent != second.handle.agent
    for dst, exporter in enumerate((first, second)):
        sink.connect(exporter.handle)
        assert finish(sink.read(exporter.handle, [5], [dst])) is ReadState.DONE
        assert np.array_equal(pool.pages[dst], exporter.pages[5])


def test_final_states_stay(fabric: Fabric) -> None:
    exporter, pool, sink = fabric.linked()
    op = sink.read(exporter.handle, [1], [1])
    assert finish(op) is ReadState.DONE
    exporter.kill()
    pool.pages[:] = POISON
    assert [op.poll() for _ in range(3)] == [ReadState.DONE] * 3
    assert (pool.pages == POISON).all(), "a final read was copied again"


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([3, 16], [0, 1], "src_pages holds page 16, the pool has pages 0 to 15"),
        ([-1], [0], "src_pages holds page -1"),
        ([0], [4], "dst_pages holds page 4, the pool has pages 0 to 3"),
        ([0], [-2], "dst_pages holds page -2"),
        ([0, 1], [0], "2 source pages into 1 destination pages"),
        ([], [], "0 source pages"),
    ],
)
def test_bad_pages_are_refused(src: list[int], dst: list[int], message: str) -> None:
    """All transports share the check (transfer/polled.py)."""
    exporter, pool, sink = Fabric("local").linked()
    with pytest.raises(TransferError, match=message):
        sink.read(exporter.handle, src, dst)
    assert (pool.pages == POISON).all()


def test_pools_that_do_not_fit_are_refused(fabric: Fabric) -> None:
    exporter, pool = fabric.exporter(), Pool(4, 2048)
    sink = fabric.sink(pool)
    with pytest.raises(TransferError, match="pages of 4096 bytes, ours have 2048"):
        sink.connect(exporter.handle)
    larger = msgspec.structs.replace(exporter.handle, page_bytes=2048, num_pages=2**32 - 1)
    with pytest.raises(TransferError, match=f"num_pages of .* is 4294967295; the limit is {MOST_PAGES}"):
        sink.connect(larger)  # it would describe each of them
    with pytest.raises(TransferError, match="imports over"):
        sink.connect(msgspec.structs.replace(exporter.handle, transport="carrier-pigeon"))


def test_peer_must_be_connected(fabric: Fabric) -> None:
    exporter, pool = fabric.exporter(), Pool(4, 4096)
    sink = fabric.sink(pool)
    with pytest.raises(TransferError, match="not connected"):
        sink.read(exporter.handle, [0], [0])
    sink.connect(exporter.handle)
    sink.connect(exporter.handle)
    assert finish(sink.read(exporter.handle, [2], [2])) is ReadState.DONE
    sink.disconnect(exporter.handle.agent)
    sink.disconnect(exporter.handle.agent)
    with pytest.raises(TransferError, match="not connected"):
        sink.read(exporter.handle, [0], [0])
    sink.connect(exporter.handle)
    assert finish(sink.read(exporter.handle, [3], [3])) is ReadState.DONE
    assert np.array_equal(pool.pages[2:], exporter.pages[2:4])


def test_reads_in_flight_outlive_a_disconnect(fabric: Fabric) -> None:
    exporter, pool, sink = fabric.linked(16, page_bytes=1 << 20)
    op = sink.read(exporter.handle, list(range(16)), list(range(16)))
    sink.disconnect(exporter.handle.agent)
    assert finish(op) is ReadState.DONE
    assert np.array_equal(pool.pages, exporter.pages)


def test_a_dead_peer_fails_and_its_successor_works(fabric: Fabric) -> None:
    exporter, pool, sink = fabric.linked()
    assert finish(sink.read(exporter.handle, [0], [0])) is ReadState.DONE
    exporter.kill()
    op = sink.read(exporter.handle, [1], [1])
    assert finish(op) is ReadState.FAILED
    assert exporter.handle.agent in op.error
    sink.disconnect(exporter.handle.agent)

    successor = fabric.exporter(seed=2)
    sink.connect(successor.handle)
    assert finish(sink.read(successor.handle, [1], [1])) is ReadState.DONE
    assert np.array_equal(pool.pages[1], successor.pages[1])


def test_a_peer_that_died_before_the_first_read(fabric: Fabric) -> None:
    exporter, pool = fabric.exporter(), Pool(4, 4096)
    sink = fabric.sink(pool)
    exporter.kill()
    try:
        sink.connect(exporter.handle)
    except TransferError as error:
        assert exporter.handle.agent in str(error)
    else:
        assert finish(sink.read(exporter.handle, [1], [1])) is ReadState.FAILED


def test_close_makes_every_read_final(fabric: Fabric) -> None:
    exporter, pool, sink = fabric.linked(16)
    ops = [sink.read(exporter.handle, [i], [i]) for i in range(16)]
    sink.close()
    sink.close()
    pages = pool.pages.copy()
    assert ReadState.PENDING not in [op.poll() for op in ops]
    assert np.array_equal(pool.pages, pages), "a page changed after close"
