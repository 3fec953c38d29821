"""What `make chaos` counts as broken."""

from __future__ import annotations

from millrace_testing.chaos import Observed, Report, Seen
from millrace_testing.overload_chaos import Phase
from millrace_testing.overload_chaos import Report as Overload

HANGS = "E decode millrace_serve.worker.frontend.ranks: rank 0 hangs: no step has ended for 2.0 s"


def test_report_names_what_nobody_caused() -> None:
    struck = [Observed(name, 0.0) for name in ("stop rank of decode", "hang step of prefill")]
    assert [Report(struck, alarms=[HANGS] * count).false_alarms() for count in (2, 3)] == [0, 1]
    phase = Phase(2.0, 3.0, sent=3, computed=1)
    phase.streams.seen += [Seen(0.0, 5.0, tokens=9, first=1.0), Seen(0.0, 0.1, error="QUEUE_FULL", retry_after_s=3.0)]
    assert Overload(1.0, [phase]).broken() == ["at 2.0 times: lost 1"], "a request that never ended"
