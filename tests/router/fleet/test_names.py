"""Workers under names whose addresses change."""

from __future__ import annotations

from collections.abc import Callable

from millrace_testing.dns import name_server
from router.fake_worker import UNIFIED, FakeWorker, expected


async def test_a_worker_that_comes_back_at_another_address(cluster: Callable) -> None:
    """In between its name does not exist."""
    worker = FakeWorker(UNIFIED)
    port = int((await worker.start("127.0.0.2:0")).rpartition(":")[2])
    async with name_server() as dns:
        dns.addresses["worker.test"] = "127.0.0.2"
        made = await cluster(workers=(dns.target("worker.test", port),))
        assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
        for address in ("127.0.0.3", "127.0.0.4", "127.0.0.2"):
            await worker.stop()
            del dns.addresses["worker.test"]
            await made.until(lambda: not made.router.registry.ready)
            asked = len(dns.asked)
            await made.until(lambda asked=asked: len(dns.asked) > asked)
            worker.epoch += "x"
            await worker.start(f"{address}:{port}")
            dns.addresses["worker.test"] = address
            await made.until(lambda: made.router.registry.ready)
            assert (await made.generate([1, 2])).tokens() == expected([1, 2], 8)
        await worker.stop()
