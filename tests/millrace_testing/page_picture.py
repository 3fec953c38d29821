"""The command `make page-picture`: a picture of the router's page, of simulated workers under load.

Arrivals come and go, so that the lines have a shape; one worker is killed, and comes back.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import math
import random
import tempfile
import time
from pathlib import Path

import httpx
from millrace_cli.cluster import ClusterSpec

from millrace_testing.browser import browser
from millrace_testing.cluster import ControlledCluster
from millrace_testing.paths import ROOT

PICTURE = ROOT / "docs" / "figures" / "page.png"
WIDTH, HEIGHT = 1240, 900
WAVE_S, PER_S = 150.0, 3.0  # of arrivals: length, and mean
COSTS = ("sim.step_s=0.02", "sim.token_s=0.0001", "served_name=simulated")
KILLED = "decode-1"


async def arrive(url: str) -> None:
    """Send requests until cancelled; what becomes of them is on the page."""
    begun, seeds = time.monotonic(), itertools.count()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as sent:
        while True:
            rate = PER_S * (1 + 0.7 * math.sin(2 * math.pi * (time.monotonic() - begun) / WAVE_S))
            await asyncio.sleep(random.expovariate(rate))
            sent.create_task(ask(client, next(seeds)))


async def ask(client: httpx.AsyncClient, seed: int) -> None:
    length = round(random.lognormvariate(5, 0.6))
    body = {"prompt": f"{seed} " + "to and fro " * length, "max_tokens": 50 + length, "ignore_eos": True, "seed": seed}
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                pass


async def take(seconds: float, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = ClusterSpec(prefill=2, decode=2, engine="sim", worker_set=COSTS)
        async with ControlledCluster(spec) as cluster, browser(Path(folder)) as started:
            load = asyncio.create_task(arrive(cluster.http_url))
            await asyncio.sleep(0.7 * seconds)
            await cluster.kill(KILLED)
            await cluster.restart(KILLED)
            await asyncio.sleep(0.3 * seconds)
            page = await started.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            await page.goto(cluster.admin_http_url)
            await page.locator("#end-rows tr").first.wait_for()
            await page.screenshot(path=out, full_page=True)
            load.cancel()
            await asyncio.wait([load])


def main() -> None:
    parser = argparse.ArgumentParser(prog="make page-picture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.2, help="minutes of load; the page shows the last five")
    parser.add_argument("--out", type=Path, default=PICTURE)
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    random.seed(1)
    asyncio.run(take(60 * settings.minutes, settings.out))
    logging.info("%s: %d KB", settings.out, settings.out.stat().st_size // 1000)


if __name__ == "__main__":
    main()
