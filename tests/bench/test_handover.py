import math

import httpx
from millrace_bench.handover import STAGE, TRANSFER, Histogram

PAGE = """# TYPE millrace_kv_transfer_seconds histogram
millrace_kv_transfer_seconds_sum {total}
millrace_kv_transfer_seconds_count {count}
millrace_stage_seconds_sum{{stage="kv_transfer"}} 0.5
millrace_stage_seconds_count{{stage="kv_transfer"}} 10.0
"""


TRANSFERS = "http://worker/metrics", f"{TRANSFER}_sum", f"{TRANSFER}_count"


def serving(*pages: tuple[float, int]) -> httpx.AsyncClient:
    """One page after the other, each with a total and a count."""
    texts = iter([PAGE.format(total=total, count=count) for total, count in pages])
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=next(texts))))


async def test_the_mean_since_the_last_look() -> None:
    async with serving((1.0, 4), (1.5, 6), (1.5, 6)) as http:
        transfer = Histogram(*TRANSFERS)
        assert [await transfer.since(http), await transfer.since(http)] == [0.25, 0.25]
        assert math.isnan(await transfer.since(http))


async def test_a_request_that_is_counted_a_moment_later() -> None:
    async with serving((0, 0), (0, 0), (0, 0), (0.25, 2)) as http:
        transfer = Histogram(*TRANSFERS)
        assert math.isnan(await transfer.since(http))
        assert await transfer.since(http, patience_s=60.0) == 0.125


async def test_a_stage_of_the_router() -> None:
    async with serving((0, 0)) as http:
        stage = Histogram("http://router/metrics", *(STAGE.format(part=part) for part in ("sum", "count")))
        assert await stage.since(http) == 0.05
