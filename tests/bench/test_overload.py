"""The overload of a simulated engine. Its clock is simulated too, so a run depends on its seed only."""

from __future__ import annotations

import argparse

import pytest
from millrace_bench.overload import SHOWN, compare


@pytest.mark.long
def test_fewer_preemptions_with_room_for_outputs() -> None:
    args = argparse.Namespace(
        load=1.5, requests=90, pages=80, prompt=32, output=192, sigma=1.0, waiting=16, ttft=10.0, tpot=0.04, seed=0
    )
    before, after = compare(args)
    assert not before["expects"] and after["expects"] and set(SHOWN) <= after.keys()
    assert 0 <= after["preemptions"] < before["preemptions"]
    assert after["recomputed"] < before["recomputed"]
    assert before["ended"] + before["refused"] == after["ended"] + after["refused"] == args.requests
