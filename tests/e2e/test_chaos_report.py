"""What `make chaos` counts, and the folder that it breaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from millrace_testing import beside_hostile, overload_chaos
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


REFUSED = {"error": "QUEUE_FULL", "retry_after_s": 3.0}
ENDS = {  # of a request: in a first phase of the run, what is broken
    "an answer": (Seen(0.0, 5.0, tokens=9, first=1.0), ""),
    "a refusal": (Seen(0.0, 0.1, **REFUSED), ""),
    "a refusal without a time to come back": (Seen(0.0, 0.1, error="QUEUE_FULL"), "lost 1"),
    "a refusal in the middle of an answer": (Seen(0.0, 5.0, tokens=1, first=1.0, **REFUSED), "lost 1"),
    "the loss of its worker": (Seen(0.0, 5.0, error="WORKER_LOST", retry_after_s=1.0), "lost 1"),
}


@pytest.mark.parametrize(("seen", "broken"), ENDS.values(), ids=ENDS)
def test_what_overload_may_do_to_a_request(seen: Seen, broken: str) -> None:
    phase = overload_chaos.Phase(1.5, 3.0, sent=2, computed=seen.tokens > 0)
    phase.streams.seen += [seen, Seen(0.0, 0.1, **REFUSED)]
    found = overload_chaos.Report(1.0, [phase]).broken()
    assert found == ([f"at 1.5 times: {broken}"] if broken else [])


def test_what_else_overload_must_not_do() -> None:
    def report(phase: overload_chaos.Phase, **lines: list[str]) -> list[str]:
        return overload_chaos.Report(1.0, [phase], **lines).broken()

    def phase(**changed: int) -> overload_chaos.Phase:
        made = overload_chaos.Phase(2.0, 3.0, **{"sent": 2, "computed": 1, **changed})
        made.streams.seen += [Seen(0.0, 5.0, tokens=9, first=1.0), Seen(0.0, 0.1, **REFUSED)]
        return made

    assert report(phase()) == []
    assert report(phase(sent=3)) == ["at 2.0 times: lost 1"], "a request that never ended"
    assert report(phase(computed=2)) == ["at 2.0 times: computed_and_refused 1"]
    assert report(phase(), ejected=["decode worker a"], alarms=["rank 0 hangs"]) == ["decode worker a", "rank 0 hangs"]
    wrong = phase()
    wrong.streams.violations.append("wrong tokens")
    assert report(wrong) == ["at 2.0 times: wrong_or_hung 1"]
    unlimited = phase(sent=1)
    unlimited.streams.seen.pop()
    assert report(unlimited) == ["nothing was refused: this was no overload"]


def test_whom_nobody_killed_is_ejected_in_vain() -> None:
    lines = "08:00 W router: decode worker ab12 is ejected: failures in a row, for 10 s\nI router: nothing\n"
    assert [epoch for _, epoch in overload_chaos.EJECTED.findall(lines)] == ["ab12"]


def test_a_hostile_tenant_is_noticed_by_a_fifth() -> None:
    def report(beside: float) -> beside_hostile.Report:
        made = beside_hostile.Report()
        for api in ("HTTP", "gRPC"):
            for hostile, slower in ((False, 1.0), (True, beside if api == "gRPC" else 1.0)):
                made.seen[api, hostile] = beside_hostile.Seen([0.1 * slower] * 50, [0.02] * 900)
        return made

    assert report(1.19).broken() == []
    assert report(1.3).broken() == ["gRPC, first token: 1.30 times"]
    made = report(1.0)
    made.wrong.append("gRPC: wrong")
    made.refused["QUEUE_FULL"] += 2
    made.ended.append("router has ended")
    assert made.broken() == ["gRPC: wrong", "2 honest requests ended with QUEUE_FULL", "router has ended"]
