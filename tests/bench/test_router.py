"""The router's bench, small: that it measures what it says."""

import pytest
from millrace_bench.router import TICK, run
from millrace_bench.router_system import Settings


@pytest.mark.long  # test_peers.py has the system and its clients
@pytest.mark.parametrize("api", ["grpc", "http"])
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
