from __future__ import annotations

import math

import httpx
from millrace_bench.handover import STAGE, TRANSFER, Histogram

PAGE = """# TYPE millrace_kv_transfer_seconds histogram
millrace_kv_transfer_seconds_sum {total}
millrace_kv_transfer_seconds_count {count}
millrace_stage_seconds_sum{{stage="kv_transfer"}} 0.5
millrace_stage_seconds_count{{stage="kv_transfer"}} 10.0
"""


async def test_the_mean_since_the_last_look() -> None:
    pages = iter([(1.0, 4), (1.5, 6), (1.5, 6)])

    def answer(request: httpx.Request) -> httpx.Response:
        total, count = next(pages)
        return httpx.Response(200, text=PAGE.format(total=total, count=count))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        transfer = Histogram("http://worker/metrics", f"{TRANSFER}_sum", f"{TRANSFER}_count")
        assert [await transfer.since(http), await transfer.since(http)] == [0.25, 0.25]
        assert math.isnan(await transfer.since(http))


async def test_a_request_that_is_counted_a_moment_later() -> None:
    counts = iter([0, 0, 0, 2])

    def answer(request: httpx.Request) -> httpx.Response:
        count = next(counts)
        return httpx.Response(200, text=PAGE.format(total=count / 8, count=count))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        transfer = Histogram("http://worker/metrics", f"{TRANSFER}_sum", f"{TRANSFER}_count")
        assert math.isnan(await transfer.since(http))
        assert await transfer.since(http, patience_s=60.0) == 0.125


async def test_a_stage_of_the_router() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=PAGE.format(total=0, count=0)))
    async with httpx.AsyncClient(transport=transport) as http:
        stage = Histogram("http://router/metrics", *(STAGE.format(part=part) for part in ("sum", "count")))
        assert await stage.since(http) == 0.05
