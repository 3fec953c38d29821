"""Sampling over DeepSeek-V3's vocabulary: greedy, drawn, and drawn from what filters keep; beside it PyTorch's sort."""

import functools
from collections.abc import Iterator

import torch
from millrace_kernels.sample_tokens import SampleParams, sample_tokens
from torch import Tensor

from millrace_bench.kernels.case import Call, Case, candidates, forced

OP = "sample_tokens.sample_tokens"
KINDS = {"greedy": (0.0, 0, 1.0), "drawn": (0.8, 0, 1.0), "top_p": (0.8, 0, 0.95), "top_k top_p": (0.8, 50, 0.95)}


def cases(device: torch.device) -> Iterator[Case]:
    sizes, vocab = ((1, 17, 64, 256), 129280) if device.type == "cuda" else ((2,), 64)
    for num in sizes:
        for kind in KINDS:
            make = functools.partial(_calls, num, vocab, kind, device)
            yield Case(OP, f"S={num} V={vocab} {kind}", make, 4.0 * num * vocab, 0.0)


def _calls(num: int, vocab: int, kind: str, device: torch.device) -> dict[str, Call]:
    temperature, top_k, top_p = KINDS[kind]

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num,), value, dtype=dtype, device=device)

    seeds = torch.randint(1 << 62, (num,), device=device)
    call = functools.partial(
        sample_tokens,
        torch.randn(num, vocab, device=device) * 3,
        SampleParams(column(temperature), column(top_k, torch.int64), column(top_p), column(0.0), seeds),
        seeds >> 40,
        draws=temperature > 0,
        filters=bool(top_k) or top_p < 1,
    )
    return candidates(OP, call, device, num) | {"ref": functools.partial(forced, OP, "", call)}
