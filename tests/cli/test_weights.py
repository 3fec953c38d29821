"""`millrace weights`, as a trainer's script calls it."""

from millrace.v1 import worker_pb2
from millrace_testing.command import Run
from millrace_testing.inside import inside
from millrace_testing.procs import SIM, Worker


async def states(*both: Worker) -> list[int]:
    return [(await worker.info()).state for worker in both]


async def test_all_workers_are_asked_and_each_is_reported(millrace: Run) -> None:
    async with inside("prefill", "decode", sets=(*SIM, "weights_root=/")) as both:
        addresses = [worker.address for worker in both]
        version = (await both[0].info()).weights_version
        code, out, _ = await millrace("weights", *addresses, "pause")
        assert code == 0 and await states(*both) == [worker_pb2.WORKER_STATE_PAUSED] * 2
        assert all(f"{address}: version {version}, " in out for address in addresses)
        code, out, err = await millrace("weights", *addresses, "load", "--path", "/x")
        assert code == 1 and out.count("INVALID_ARGUMENT: path /x cannot be loaded") == 2
        assert "2 of 2 workers failed" in err
        code, out, err = await millrace("weights", addresses[0], "127.0.0.1:1", "resume")
        assert code == 1 and f"{addresses[0]}: version" in out and "1 of 2 workers failed: 127.0.0.1:1" in err
        assert await states(*both) == [worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_PAUSED]
