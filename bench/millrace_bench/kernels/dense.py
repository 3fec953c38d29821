"""Dense products, quantisation, norms and SwiGLU at the shapes of one DeepSeek-V3 rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from millrace_kernels.linear import linear

from millrace_bench.kernels.case import Call, Case, candidates


def cases(device: torch.device) -> Iterator[Case]:
    for tokens in (1, 64):
        make = functools.partial(_linear, tokens, 256, 256, device)
        yield Case("linear.linear", f"T={tokens} 256x256", make, 2 * 256 * (2 * tokens + 256), 2 * tokens * 256 * 256)


def _linear(tokens: int, n: int, k: int, device: torch.device) -> dict[str, Call]:
    x, weight = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (tokens, n))
    return candidates("linear.linear", lambda: linear(x, weight), device, tokens)
