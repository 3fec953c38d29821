"""The router's bench, small: that it measures what it says."""

from __future__ import annotations

import pytest
from millrace_bench.router import TICK, run, scaling
from millrace_bench.router_system import Settings


@pytest.mark.parametrize("api", [pytest.param("grpc", marks=pytest.mark.long), "http"])
def test_a_small_run(api: str) -> None:
    settings = Settings(api=api, routers=(1,), streams=4, tokens=20, requests=20, prompt_tokens=16)
    found = run(settings).results["routers"]["1"]
    assert found["tokens_per_message"] >= 1 and found["half_tokens_per_message"] >= 1
    assert all(found["cores"][role] >= 0 for role in ("router", "prefill", "decode", "clients"))
    assert found["tokens_per_s"] > 0 and found["requests_per_s"] > 0
    assert 0 < found["token_latency_ms"]["p50"] < 30_000
    assert found["ttft_ms"]["p50"] > 0 and found["direct_ms"]["p50"] > 0
    assert 0 < found["tokens_per_s_per_core"] <= 80 / TICK and found["router_us_per_request"] > 0
    assert found["limit"].split(":")[0] in ("the load", "the routers", "the machine")


def test_scaling_is_relative_to_the_smallest_number() -> None:
    rows = {"1": {"tokens_per_s": 100.0, "cpu_s_per_1000_tokens": 0.04}}
    rows["2"] = {"tokens_per_s": 180.0, "cpu_s_per_1000_tokens": 0.05}
    assert scaling(rows) == pytest.approx({"rate_1": 1.0, "rate_2": 0.9, "cpu_1": 1.0, "cpu_2": 0.8})
