"""What only NIXL does: processes that die in the middle of a read, its metadata, and what it costs to be idle."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace_serve.transfer.base import ReadState, TransferError
from millrace_serve.transfer.nixl import NixlSink
from transfer.pools import LOOPBACK, LOOPBACK_TCP, POISON, NixlExporter, Pool, finish

NUM_PAGES, PAGE_BYTES = 32, 1 << 20


@pytest.mark.parametrize(
    ("ucx", "kill_after_s"),
    [(LOOPBACK_TCP, 0.0), (LOOPBACK, 0.002), (LOOPBACK_TCP, 0.008)],
    ids=["tcp at once", "cma early", "tcp late"],
)
def test_peer_killed_during_reads_ends_every_read(ucx: dict[str, str], kill_after_s: float) -> None:
    """kill -9 while 32 MB are on the way: every read ends, DONE means whole, and nothing lands after the end."""
    exporter, pool = NixlExporter(NUM_PAGES, PAGE_BYTES, seed=1, ucx=ucx), Pool(NUM_PAGES, PAGE_BYTES)
    sink = NixlSink(pool.buffer, ucx)
    with closing(exporter), closing(sink):
        sink.connect(exporter.handle)
        assert finish(sink.read(exporter.handle, [0], [0])) is ReadState.DONE
        pool.pages[:] = POISON
        killer = threading.Timer(kill_after_s, exporter.kill)
        killer.start()
        ops = []
        for pages in np.array_split(np.random.default_rng(2).permutation(NUM_PAGES), 16):
            try:
                ops.append((pages, sink.read(exporter.handle, pages.tolist(), pages.tolist())))
            except TransferError as error:  # it was already noticed
                assert exporter.handle.agent in str(error)
        states = [finish(op) for _, op in ops]
        killer.join()
        for (pages, op), state in zip(ops, states, strict=True):
            if state is ReadState.DONE:
                assert np.array_equal(pool.pages[pages], exporter.pages[pages])
            else:
                assert exporter.handle.agent in op.error
        at_end = pool.pages.copy()
        successor = NixlExporter(NUM_PAGES, PAGE_BYTES, seed=3, ucx=ucx)
        sink.connect(successor.handle)
        assert np.array_equal(pool.pages, at_end), "a read landed after it was final"
        assert finish(sink.read(successor.handle, [7], [7])) is ReadState.DONE
        assert np.array_equal(pool.pages[7], successor.pages[7])
        successor.close()


def test_reads_over_tcp_arrive() -> None:
    exporter, pool = NixlExporter(8, PAGE_BYTES, seed=1, ucx=LOOPBACK_TCP), Pool(8, PAGE_BYTES)
    sink = NixlSink(pool.buffer, LOOPBACK_TCP)
    with closing(exporter), closing(sink):
        sink.connect(exporter.handle)
        assert finish(sink.read(exporter.handle, [7, 1, 4], [0, 1, 2])) is ReadState.DONE
        assert np.array_equal(pool.pages[:3], exporter.pages[[7, 1, 4]])
        assert (pool.pages[3:] == POISON).all()


class Refusing:
    """NIXL's agent of `sink`, which reports an error for whatever is given back to it, and behind a failed read."""

    def __init__(self, sink: NixlSink) -> None:
        self._nixl, self._error = sink._agent.nixl, sink._agent.lib.nixlBackendError
        sink._agent.nixl = self

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._nixl, name)
        if not name.startswith(("release", "invalidate", "deregister", "getNotifs")):
            return call

        def refuse(*args: Any) -> None:
            call(*args)
            raise self._error("refused")

        return refuse


def test_what_nixl_does_not_take_back_fails_no_read() -> None:
    exporter, pool = NixlExporter(8, PAGE_BYTES, seed=1, ucx=LOOPBACK_TCP), Pool(8, PAGE_BYTES)
    sink = NixlSink(pool.buffer, LOOPBACK_TCP)
    Refusing(sink)
    with closing(exporter), closing(sink):
        for page in range(2):
            sink.connect(exporter.handle)
            assert finish(sink.read(exporter.handle, [page], [page])) is ReadState.DONE
            sink.disconnect(exporter.handle.agent)
        assert np.array_equal(pool.pages[:2], exporter.pages[:2])
        sink.connect(exporter.handle)
        exporter.kill()
        assert finish(sink.read(exporter.handle, [2], [2])) is ReadState.FAILED


def test_metadata_that_makes_no_sense_is_refused() -> None:
    exporter, other = NixlExporter(2, 4096, seed=1), NixlExporter(2, 4096, seed=1)
    pool = Pool(2, 4096)
    sink = NixlSink(pool.buffer, LOOPBACK)
    replace = msgspec.structs.replace
    with closing(other), closing(exporter), closing(sink):
        with pytest.raises(TransferError, match=exporter.handle.agent):
            sink.connect(replace(exporter.handle, metadata=b"not metadata"))
        with pytest.raises(TransferError, match="belongs to"):
            sink.connect(replace(exporter.handle, metadata=other.handle.metadata))
        with pytest.raises(TransferError, match=f"{exporter.handle.agent} has pages in 'HBM'"):
            sink.connect(replace(exporter.handle, mem_type="HBM"))
        with pytest.raises(TransferError, match="does not export the pages it claims"):
            sink.connect(replace(exporter.handle, base=exporter.handle.base + (1 << 30)))
        sink.connect(exporter.handle)
        assert finish(sink.read(exporter.handle, [1], [1])) is ReadState.DONE


def test_impossible_setting_is_a_clear_error() -> None:
    pool = Pool(2, 4096)
    with pytest.raises(TransferError, match=r"cannot create its UCX backend with .*'TLS=shm'"):
        NixlSink(pool.buffer, {"TLS": "shm"})  # shm has no peer failure handling


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_exporter_costs_no_cpu() -> None:
    """NIXL's progress thread spins on a whole core unless it is told how often to wake."""
    exporter = NixlExporter(2, 4096, seed=1)
    with closing(exporter):
        before = cpu_seconds(exporter.pid)
        time.sleep(0.4)
        assert cpu_seconds(exporter.pid) - before < 0.1


def test_it_runs_without_torch() -> None:
    """The simulated engine moves real pages without loading torch."""
    code = (
        "import sys; from transfer.pools import *; pool = Pool(2, 4096); "
        "source, sink = NixlSource(pool.buffer, LOOPBACK), NixlSink(pool.buffer, LOOPBACK); "
        "sink.close(); source.close(); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
