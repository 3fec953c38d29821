"""ControlledCluster over stand-in processes: start, kill, restart, and that nothing ever stays behind."""

import asyncio
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import pytest
from millrace_cli import probe
from millrace_cli.cluster import GPU_START_S, LOG_DIR, START_S, StartError
from millrace_testing.cluster import ControlledCluster


async def test_start_gives_addresses_and_stop_leaves_nothing(make_spec, wait_gone) -> None:
    async with ControlledCluster(make_spec(prefill=1, decode=2)) as cluster:
        assert set(cluster.processes) == {"router", "prefill-0", "decode-0", "decode-1"}
        assert {process.state for process in cluster.processes.values()} == {"ready"}
        assert await probe.is_serving(cluster.grpc_address)
        assert cluster.http_url.startswith("http://127.0.0.1:")
        listed = {worker.address for worker in await probe.workers(cluster.admin_address)}
        assert listed == {cluster.address(name) for name in ("prefill-0", "decode-0", "decode-1")}
        pids = [cluster.pid(name) for name in cluster.processes]
    wait_gone(pids)
    assert [process.returncode for process in cluster.processes.values()] == [0, 0, 0, 0]


async def test_worker_that_dies_comes_back_on_its_port_once(make_spec, caplog: pytest.LogCaptureFixture) -> None:
    """By itself; by hand after a kill, and while it would come back by itself; and the router keeps its ports."""
    async with ControlledCluster(make_spec(restart=True)) as cluster:
        address, pid = cluster.address("prefill-0"), cluster.pid("prefill-0")
        os.kill(pid, signal.SIGKILL)
        await cluster.processes["prefill-0"].wait()
        await cluster.wait_routable("prefill-0")
        assert cluster.address("prefill-0") == address and cluster.pid("prefill-0") != pid
        assert "prefill-0 ended with code -9" in caplog.text
        address = cluster.address("decode-0")
        await cluster.kill("decode-0")
        assert not cluster.processes["decode-0"].running and await probe.worker_info(address) is None
        before = cluster.grpc_address, cluster.admin_address, cluster.admin_http_url
        await asyncio.gather(cluster.restart("decode-0"), cluster.restart("router"))
        await cluster.wait_routable("decode-0")
        assert cluster.address("decode-0") == address
        assert (cluster.grpc_address, cluster.admin_address, cluster.admin_http_url) == before
        os.kill(cluster.pid("decode-0"), signal.SIGKILL)
        await cluster.processes["decode-0"].wait()
        await asyncio.sleep(0)  # the watcher now waits before it brings decode-0 back
        await cluster.restart("decode-0")
        assert cluster._watchers["decode-0"].done() or cluster.processes["decode-0"].starts == 3
        await cluster.wait_routable()
        assert cluster.processes["decode-0"].starts == 3


async def test_restart_that_fails_is_tried_again(make_spec, caplog: pytest.LogCaptureFixture) -> None:
    """Its log can neither be read nor written for a while."""
    async with ControlledCluster(make_spec(restart=True)) as cluster:
        process = cluster.processes["prefill-0"]
        process.log_path.unlink()
        process.log_path.mkdir()
        os.kill(process.pid, signal.SIGKILL)
        while "prefill-0 cannot be started" not in caplog.text:
            assert not cluster._watchers["prefill-0"].done()
            await asyncio.sleep(0.05)
        process.log_path.rmdir()
        await cluster.wait_routable("prefill-0")
        assert process.starts == 2


async def test_worker_that_dies_stays_dead_without_restart(make_spec, caplog: pytest.LogCaptureFixture) -> None:
    async with ControlledCluster(make_spec()) as cluster:
        os.kill(cluster.pid("prefill-0"), signal.SIGKILL)
        await cluster.processes["prefill-0"].wait()
        with pytest.raises(StartError, match="prefill-0 ended with code -9"):
            await cluster.wait_routable("prefill-0")


async def test_child_that_exits_during_start_shows_its_log_and_stops_all(make_spec, wait_gone) -> None:
    cluster = ControlledCluster(make_spec(worker_set=("die=0",)))
    with pytest.raises(StartError, match=r"(?s)ended with code 1.*standin: no such checkpoint"):
        async with cluster:
            pass
    wait_gone([cluster.pid(name) for name in ("prefill-0", "decode-0")])


async def test_start_gives_up_and_says_who_is_late(make_spec, wait_gone, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ControlledCluster(make_spec(worker_set=("never=true",), start_timeout_s=100))

    class Clock:
        """Leaps over the limit once the worker's state was seen, however long that takes on a busy machine."""

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + (100 if cluster.processes["prefill-0"].detail else 0)

    monkeypatch.setattr("millrace_cli.cluster.time", Clock)
    late = (
        r"(?s)not ready after 100 s: .*prefill-0 loading layer 1 of 2.*The end of \S*/prefill-0.log:\nstandin: prefill"
    )
    with pytest.raises(StartError, match=late):
        async with cluster:
            pass
    wait_gone([cluster.pid(name) for name in cluster.processes])


def test_worker_on_a_gpu_has_time_to_compile(make_spec) -> None:
    assert make_spec(start_timeout_s=None).patience_s == START_S
    assert make_spec(start_timeout_s=7, worker_set=("device=cuda",)).patience_s == 7
    assert make_spec(start_timeout_s=None, worker_set=("device=cuda",)).patience_s == GPU_START_S


def test_workers_share_the_memory_of_a_gpu(make_spec) -> None:
    on_gpu = ("device=cuda", "dtype=bfloat16")
    both = make_spec(worker_set=on_gpu, gpus=1)
    assert both.settings("prefill-0") == ("first_gpu=0", "memory_fraction=0.450", *on_gpu)
    assert both.settings("decode-0") == ("first_gpu=1", "memory_fraction=0.450", *on_gpu)
    assert make_spec(worker_set=on_gpu, prefill=0, gpus=1).settings("decode-0") == ("first_gpu=0", *on_gpu)
    told = (*on_gpu, "memory_fraction=0.2")
    assert make_spec(worker_set=told, gpus=1).settings("prefill-0") == ("first_gpu=0", *told)
    assert make_spec(worker_set=("dtype=bfloat16",)).settings("prefill-0") == ("dtype=bfloat16",)


def test_workers_have_gpus_of_their_own_where_there_are_enough(make_spec) -> None:
    on_gpu = ("device=cuda", "tp=2")
    assert make_spec(worker_set=on_gpu, gpus=4).settings("decode-0") == ("first_gpu=2", *on_gpu)
    crowded = make_spec(worker_set=on_gpu, decode=2, gpus=4)
    assert crowded.settings("decode-1") == ("first_gpu=4", "memory_fraction=0.450", *on_gpu)
    two = make_spec(worker_set=on_gpu, gpus=2)  # both workers on both GPUs: ranks take the GPUs in turn
    assert two.settings("decode-0") == ("first_gpu=2", "memory_fraction=0.450", *on_gpu)
    again, wrong = (*on_gpu, "tp=1"), ("device=cuda", "tp=two")  # the last counts; what is no number a worker refuses
    assert make_spec(worker_set=again, gpus=4).settings("decode-0") == ("first_gpu=1", *again)
    assert make_spec(worker_set=wrong, gpus=4).settings("decode-0") == ("first_gpu=1", *wrong)


def test_logs_may_be_kept_elsewhere(tmp_path: Path, make_spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_DIR, str(tmp_path / "kept" / "here"))
    first, second = (ControlledCluster(make_spec(log_dir=None)).log_dir for _ in range(2))
    assert first != second and first.parent == second.parent == tmp_path / "kept" / "here"


async def test_taken_port_fails_the_start(make_spec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with ControlledCluster(make_spec(ports={"grpc": port})):
                pass


async def test_deaf_child_and_its_own_children_are_killed(make_spec, wait_gone) -> None:
    spec = make_spec(worker_set=("deaf=true",), stop_grace_s=0.3)
    async with ControlledCluster(spec) as cluster:
        pids = [cluster.pid(name) for name in cluster.processes]
    children = [int(path.read_text()) for path in Path(spec.log_dir).glob("*.child")]
    assert len(children) == 2
    wait_gone(pids + children)


async def test_child_that_ends_while_all_are_killed_spares_no_other(make_spec, wait_gone) -> None:
    async with ControlledCluster(make_spec(worker_set=("deaf=true",), stop_grace_s=60)) as cluster:
        pids = [cluster.pid(name) for name in cluster.processes]
        os.kill(cluster.pid("router"), signal.SIGKILL)
        wait_gone([cluster.pid("router")])  # the event loop, blocked here, does not hear of the end
        assert cluster.processes["router"].running
        cluster.kill_all()
        wait_gone(pids)


async def test_stop_that_is_cancelled_at_once_kills(make_spec, wait_gone) -> None:
    async with ControlledCluster(make_spec()) as cluster:
        pids = [cluster.pid(name) for name in cluster.processes]
        stopping = asyncio.create_task(cluster.stop())
        await asyncio.sleep(0)  # it waits for the ends of the watchers
        stopping.cancel()
        await asyncio.wait({stopping})
        assert stopping.cancelled()
        wait_gone(pids)


async def test_worker_that_ends_after_it_was_seen_ready_fails_the_start(
    make_spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watcher has given up, as for every end during the start."""
    cluster = ControlledCluster(make_spec(restart=True))
    is_ready = cluster._ready

    async def ready_and_gone() -> bool:
        if not await is_ready():
            return False
        os.kill(cluster.pid("decode-0"), signal.SIGKILL)
        await asyncio.wait({cluster._watchers["decode-0"]})
        return True

    monkeypatch.setattr(cluster, "_ready", ready_and_gone)
    with pytest.raises(StartError, match="decode-0 ended with code -9"):
        async with cluster:
            pass


async def test_kill_minus_nine_of_the_supervisor_leaves_nothing(tmp_path: Path, wait_gone) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        from conftest import standin_command
        from millrace_cli.cluster import ClusterSpec, LocalCluster

        async def main():
            async with LocalCluster(ClusterSpec(command=standin_command)) as cluster:
                print(*(process.pid for process in cluster.processes.values()), flush=True)
                await asyncio.sleep(600)

        asyncio.run(main())
    """)
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    pids = [int(pid) for pid in (await supervisor.stdout.readline()).split()]
    assert len(pids) == 3
    supervisor.kill()
    await supervisor.wait()
    wait_gone(pids)
