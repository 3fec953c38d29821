"""What `make chaos` counts, and the folder that it breaks."""

from __future__ import annotations

import random
from pathlib import Path

from millrace_testing.chaos import Observed, Report, Seen
from millrace_testing.shared_disk import SharedDisk

HANGS = "E decode millrace_serve.worker.frontend.ranks: rank 0 hangs: no step has ended for 2.0 s"
SILENT = "W router millrace_router.fleet.worker: worker a:1 lost: no progress for 2.0 s, and 2.0 s are allowed"


def test_a_rank_that_nobody_stopped_is_a_false_alarm() -> None:
    struck = [Observed(name, 0.0) for name in ("stop rank of decode", "hang step of prefill", "partition decode")]
    assert Report(struck, alarms=[HANGS, SILENT, HANGS]).false_alarms() == 0
    assert Report(struck, alarms=[HANGS, HANGS, HANGS]).false_alarms() == 1


def test_the_pause_of_a_request_is_its_longest() -> None:
    seen = [Seen(0.0, 5.0, [(1.0, 0.5), (4.0, 3.0)], tokens=7), Seen(0.0, 1.0, tokens=3, error="STALLED")]
    results = Report([Observed("kill decode", 0.0)], seen).results()
    assert (results["pause_p50_s"], results["pause_p100_s"], results["tokens"]) == (1.5, 3.0, 10)
    assert results["errors"] == {"STALLED": 1}
    (row,) = results["faults"]
    assert (row["times"], row["errors"], row["pause_s"]) == (1, 1, 3.0)


def test_a_disk_is_full_until_it_is_freed_and_loses_what_it_had(tmp_path: Path) -> None:
    disk = SharedDisk(tmp_path / "disk", mib=1)
    try:
        for i in range(40):
            (disk.folder / f"page-{i}").write_bytes(bytes(4096))
        if disk.bounded:
            disk.fill()
            assert disk.is_full()
            disk.free()
        assert not disk.is_full()
        disk.tear(random.Random(0))
        sizes = [path.stat().st_size for path in disk.pages()]
        assert len(sizes) == 40
        assert set(sizes) == {2048, 4096}
        disk.lose()
        assert disk.pages() == []
    finally:
        disk.close()
