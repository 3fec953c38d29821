"""What a process says on its /metrics page. `url`: of the process."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from millrace_testing import HANG_S


async def samples(url: str, name: str) -> list[Sample]:
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/metrics", timeout=HANG_S).read().decode())
    every = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [sample for sample in every if sample.name == name]


async def total(url: str, name: str, **labels: str) -> float:
    """Of the samples with these labels; 0 when there are none."""
    return sum(one.value for one in await samples(url, name) if labels.items() <= one.labels.items())
