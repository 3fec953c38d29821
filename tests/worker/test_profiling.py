"""Profiles: the frontend's end with scripted ranks, a rank's end with torch, and what is refused."""

import asyncio
import gzip
import json
from collections import deque
from pathlib import Path

import pytest
import torch
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.profiling import Profiling
from millrace_serve.worker.messages import ProfileDone, StartProfile, StopProfile
from millrace_serve.worker.rank.profiler import RankProfiler
from millrace_testing.paths import TINY


class ScriptedRanks:
    def __init__(self) -> None:
        self.told: list[StartProfile | StopProfile] = []
        self.errors: deque[str | Exception] = deque()
        self.stopped = asyncio.Event()
        self.answering = asyncio.Event()
        self.answering.set()

    async def profile(self, message: StartProfile | StopProfile) -> list[ProfileDone]:
        self.told.append(message)
        if isinstance(message, StopProfile):
            self.stopped.set()
        await self.answering.wait()
        error = self.errors.popleft() if self.errors else ""
        if isinstance(error, Exception):
            raise error
        return [ProfileDone("/traces/rank0", ""), ProfileDone("/traces/rank1", error)]


def make(ranks: ScriptedRanks, **values: object) -> Profiling:
    config = WorkerConfig(**{"model": TINY, "profile_dir": Path("/traces"), **values})
    return Profiling(config, "0123456789", ranks)


def made() -> tuple[Profiling, ScriptedRanks]:
    ranks = ScriptedRanks()
    return make(ranks), ranks


async def refusal(call: object) -> MillraceError:
    with pytest.raises(MillraceError) as caught:
        await call
    return caught.value


async def test_start_and_stop_are_idempotent() -> None:
    profiling, ranks = made()
    assert await profiling.start(None) == await profiling.start(5) == Path("/traces")
    assert ranks.told == [StartProfile("/traces", "decode-01234567-1")]
    assert await profiling.stop() == await profiling.stop() == ["/traces/rank0", "/traces/rank1"]
    assert len(ranks.told) == 2
    await profiling.start(None)
    assert ranks.told[-1].label.endswith("-2")
    profiling.close()


async def test_caller_that_goes_away_leaves_no_profile_behind() -> None:
    """A forgotten profile ends by itself."""
    profiling, ranks = made()
    ranks.answering.clear()
    start = asyncio.create_task(profiling.start(0.01))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(ranks.told) == 1
    start.cancel()
    ranks.answering.set()
    await ranks.stopped.wait()
    assert await profiling.stop() == ["/traces/rank0", "/traces/rank1"]
    assert len(ranks.told) == 2


async def test_what_is_refused() -> None:
    ranks = ScriptedRanks()
    error = await refusal(make(ranks, engine="sim").start(None))
    assert error.reason is Reason.INVALID_ARGUMENT and "engine=sim" in error.message
    error = await refusal(make(ranks, profile_dir=None).start(None))
    assert error.reason is Reason.INVALID_ARGUMENT and "profile_dir" in error.message
    for seconds in (0.0, -1.0, 601.0, float("nan")):
        error = await refusal(make(ranks).start(seconds))
        assert error.reason is Reason.INVALID_ARGUMENT and "max_seconds" in error.message
    assert (await refusal(make(ranks).stop())).reason is Reason.NOT_FOUND
    assert not ranks.told


async def test_ranks_that_fail() -> None:
    profiling, ranks = made()
    lost = MillraceError(Reason.WORKER_LOST, "rank 1 ended")
    ranks.errors.extend(["rank 1: disk full", "", lost, lost])
    error = await refusal(profiling.start(None))
    assert error.reason is Reason.INTERNAL and "disk full" in error.message
    assert ranks.told[1:] == [StopProfile()], "the profile of rank 0 ends"
    assert (await refusal(profiling.start(None))).reason is Reason.WORKER_LOST
    assert await profiling.start(None) == Path("/traces"), "a start that failed is no profile"
    assert list(map(type, ranks.told[2:])) == [StartProfile, StopProfile, StartProfile]
    profiling.close()


async def test_profile_that_could_not_be_written_is_not_the_one_before() -> None:
    """It may have ended by itself, and then only the log has the error."""
    profiling, ranks = made()
    await profiling.start(None)
    assert await profiling.stop()
    ranks.errors.extend(["", "rank 1: disk full"])
    await profiling.start(None)
    assert "disk full" in (await refusal(profiling.stop())).message
    assert (await refusal(profiling.stop())).reason is Reason.NOT_FOUND


def test_a_rank_writes_what_it_computed(tmp_path: Path) -> None:
    rank = RankProfiler(3)
    path = tmp_path / "new" / "decode-x-1-rank3.json.gz"
    assert rank.handle(StartProfile(str(tmp_path / "new"), "decode-x-1")) == ProfileDone(str(path), "")
    torch.ones(4, 4) @ torch.ones(4, 4)
    assert rank.handle(StopProfile()) == ProfileDone(str(path), "")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
    assert rank.handle(StopProfile()) == ProfileDone(str(path), ""), "again"


def test_rank_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = RankProfiler(3).handle(StartProfile(str(tmp_path / "file"), "x"))
    assert "rank 3" in answer.error and answer.path == ""
