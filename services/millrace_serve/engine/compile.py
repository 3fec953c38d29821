"""torch.compile of the forward of decode steps, which graphs then capture."""

from __future__ import annotations

import torch

from millrace_serve.engine.graphs import Forward


def compiled(forward: Forward, backend: str = "inductor") -> Forward:
    """`forward` with what lies between our kernels fused; shapes that differ are compiled once for all."""
    return torch.compile(forward, backend=backend)
