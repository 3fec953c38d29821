"""Whether the router's memory of prefix caches is bounded: an hour of distinct prompts through both indexes.

`workers` full caches of `pages` pages each on the device, and as many in the host's memory. Each second of the
simulated time `requests` prompts come with `blocks` pages that nobody has seen; each goes to the next worker, which
reports them as stored, and the oldest as moved to the host's memory and removed there. The reports are decoded from
bytes, as the feed does it. Every `restart_s` simulated seconds a worker is lost, and another one comes with an empty
cache. The processes around it, and the caches themselves as this bench plays them, are a part of the RSS.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millrace.v1.worker_pb2 import CacheChange
from millrace_common.page_hash import BLOCK_BYTES
from millrace_load.record import Record, print_record
from millrace_router.config import Routing
from millrace_router.policy.kv_index import KvIndex
from millrace_router.policy.prefix_index import PrefixIndex

ROWS = 12


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: int = 3600  # simulated
    requests: int = 250  # per second
    blocks: int = 32  # of a request
    workers: int = 400
    pages: int = 2000  # of a worker, in each tier
    restart_s: int = 10


@dataclass(slots=True)
class Cache:
    """A worker's; its device and host memory, oldest first."""

    epoch: str
    sequence: int = 0
    device: deque[bytes] = field(default_factory=deque)
    host: deque[bytes] = field(default_factory=deque)

    def store(self, blocks: list[bytes], pages: int) -> bytes:
        """The report, as it comes over the wire."""
        self.device.extend(blocks)
        moved = [self.device.popleft() for _ in range(len(self.device) - pages)]
        self.host.extend(moved)
        gone = [self.host.popleft() for _ in range(len(self.host) - pages)]
        self.sequence += 1
        change = CacheChange(
            after=self.sequence - 1,
            sequence=self.sequence,
            snapshot=self.sequence == 1,
            stored=blocks,
            removed=moved,
            host_stored=moved,
            host_removed=gone,
        )
        return change.SerializeToString()


def run(s: Settings) -> Record:
    kv, prefix = KvIndex(), PrefixIndex(Routing().prefix_blocks)
    caches = [Cache(f"epoch-{i}") for i in range(s.workers)]
    rows: list[dict[str, Any]] = []
    lost, busy = 0, 0.0
    for second in range(s.seconds + 1):
        if second % max(s.seconds // ROWS, 1) == 0:
            gc.collect()
            sizes = {"kv_blocks": len(kv), "kv_host_blocks": sum(map(len, kv._host)), "prefix_blocks": len(prefix)}
            rows.append({"second": second, "rss_mib": _rss_mib(), **sizes})
            print(" ".join(f"{name}={value:,.0f}" for name, value in rows[-1].items()), flush=True)
        if second % s.restart_s == s.restart_s - 1:
            index = lost % s.workers
            kv.forget((caches[index].epoch, 0))
            lost += 1
            caches[index] = Cache(f"epoch-{s.workers + lost}")
            prefix.keep({(cache.epoch, 0) for cache in caches})
        for request in range(s.requests):
            cache = caches[(second * s.requests + request) % s.workers]
            bits = os.urandom(s.blocks * BLOCK_BYTES)
            blocks = [bits[i : i + BLOCK_BYTES] for i in range(0, len(bits), BLOCK_BYTES)]
            report = cache.store(blocks, s.pages)
            begun = time.thread_time()
            assert kv.apply((cache.epoch, 0), CacheChange.FromString(report))
            prefix.note(blocks, [(cache.epoch, 0)])
            busy += time.thread_time() - begun
    filled = next((row for row in rows if row["second"] >= s.seconds / 4), rows[-1])
    results = {
        "rows": rows,
        "distinct_blocks": s.seconds * s.requests * s.blocks,
        "workers_lost": lost,
        "grown_mib": rows[-1]["rss_mib"] - filled["rss_mib"],  # in the last three quarters
        "index_us_per_request": busy / ((s.seconds + 1) * s.requests) * 1e6,
    }
    return Record("index_growth", asdict(s), results)


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m millrace_bench.index_growth", description=__doc__)
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--out", type=Path, help="file for the record, as JSON")
    given = vars(parser.parse_args())
    out = given.pop("out")
    record = run(Settings(**given))
    if out is not None:
        out.write_text(record.to_json() + "\n")
    print_record(record)


if __name__ == "__main__":
    main()
