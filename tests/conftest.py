"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before torch is imported: several processes share few cores, where torch's own threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
