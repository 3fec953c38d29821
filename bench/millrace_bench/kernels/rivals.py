"""Decode attention and experts beside FlashInfer's, which compile for minutes at a first call."""

import itertools
from collections.abc import Iterator

import torch
from millrace_kernels.testing.attention_inputs import Draw

from millrace_bench.kernels.attention import of_decode
from millrace_bench.kernels.case import Case
from millrace_bench.kernels.moe import EP8 as EP8_RANK
from millrace_bench.kernels.moe import EP8_STEP, TINY_RANK, TP8_SHARED, of_experts

DECODE = tuple(itertools.product((16, 128), (1, 32, 128), (1024, 4096, 32768)))  # heads, sequences, keys
EXPERTS = {TP8_SHARED: (1, 16, 32, 128, 512), EP8_STEP: (16, 32, 128, 256, 8192), EP8_RANK: (1024, 32768)}


def cases(device: torch.device) -> Iterator[Case]:
    if device.type != "cuda":
        yield of_experts(TINY_RANK, 2, None, device, compared=True)
        return
    draw = Draw("cuda", torch.bfloat16)
    yield from (of_decode(draw, *shape, torch.bfloat16, compared=True) for shape in DECODE)
    for rank, tokens in EXPERTS.items():
        yield from (of_experts(rank, num, None, device, compared=True) for num in tokens)
