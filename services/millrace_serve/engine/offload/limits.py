"""How much the tiers of the prefix cache may take: of the host's memory and of a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from millrace_common.config import MOST, Config, OrAuto, OverCommitted
from pydantic import Field, model_validator

GIB = 1 << 30


class TierLimits(Config):
    prefix_cache: bool = True
    # Of each replica for copies of cached pages in the host's memory; 0: none. auto: by the pod's memory limit.
    host_cache_gib: Annotated[float, OrAuto()] = Field(0.0, ge=0, le=MOST)
    disk_cache: Path | None = None  # folder for cached pages, which outlives restarts; one user's workers may share it
    disk_cache_gib: float = Field(100.0, gt=0, le=MOST)  # size of that folder, all layouts together

    @model_validator(mode="after")
    def _each_has_the_one_above_it(self) -> Self:
        if self.host_cache_gib and not self.prefix_cache:
            raise ValueError(f"host_cache_gib={self.host_cache_gib}: needs prefix_cache, whose pages it keeps")
        if self.disk_cache and not self.host_cache_gib:
            raise ValueError(f"disk_cache={self.disk_cache}: needs host_cache_gib: pages go through the host tier")
        return self

    def host_pages(self, page_bytes: int) -> int:
        """Copies of pages that the host tier has room for."""
        return int(self.host_cache_gib * GIB) // page_bytes

    def check_host_memory(self, tp: int, hosts: Sequence[str], host: str, available: int) -> None:
        """`hosts`: of every rank; `available`: bytes of this one, `host`. Raises ValueError, OverCommitted."""
        gib, num_replicas = self.host_cache_gib, hosts[::tp].count(host)
        for leader in range(0, len(hosts), tp):
            if len({*hosts[leader : leader + tp]}) > 1:
                raise ValueError(
                    f"limits.host_cache_gib={gib:g}: the tp={tp} ranks of replica {leader // tp} must be in one "
                    f"container, whose memory they share, and are in several. Lower tp, or set it to 0"
                )
        if (wanted := int(gib * GIB) * num_replicas) > available:
            raise OverCommitted(
                f"limits.host_cache_gib={gib:g} for each of the {num_replicas} replicas of this host is "
                f"{wanted / GIB:.2f} GiB, but only {available / GIB:.2f} GiB of its memory are available. Set it to "
                f"{available * 10 // (num_replicas * GIB) / 10:g} or less"
            )
