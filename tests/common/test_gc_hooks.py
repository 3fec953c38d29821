import gc
import logging
from contextlib import closing

import pytest
from millrace_common import gc_hooks
from millrace_common.gc_hooks import GcPause, ProcessGc
from millrace_common.metrics import PROCESS, Metrics
from prometheus_client import CollectorRegistry


def test_every_collection_is_measured_with_its_generation() -> None:
    with closing(gc_hooks.PauseWatch("p")) as watch:
        gc.collect(0)
        gc.collect(2)
        pauses = watch.take()
    assert {pause.generation for pause in pauses} >= {0, 2}
    assert all(pause.seconds >= 0 for pause in pauses) and watch.take() == []
    gc.collect(2)
    assert watch.take() == []  # closed


def test_freeze_can_be_repeated() -> None:
    first = gc_hooks.freeze()
    keep = [[] for _ in range(1000)]
    assert first > 1000 and gc_hooks.freeze() >= first + len(keep)


def test_long_pauses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch = gc_hooks.PauseWatch("rank3")
    watch.close()
    watch._pauses.extend([GcPause(2, 0.2, 7), GcPause(0, 0.001, 0)])
    with caplog.at_level(logging.WARNING):
        assert len(watch.take()) == 2
    [record] = caplog.records
    assert "200.0 ms in rank3: generation 2, 7 objects" in record.getMessage()


def test_a_process_counts_its_freezes_and_pauses() -> None:
    metrics = Metrics(PROCESS, CollectorRegistry())
    value = metrics.registry.get_sample_value
    with closing(ProcessGc("router", metrics)) as own:
        assert own.freeze() > 1000
        gc.collect(1)
        own.report()
    assert value("millrace_gc_freezes_total", {"process": "router"}) == 1
    assert value("millrace_gc_pause_seconds_count", {"process": "router", "generation": "2"}) >= 1
    assert value("millrace_gc_pause_seconds_count", {"process": "router", "generation": "1"}) >= 1
