"""Perplexity of the held-out texts under a checkpoint, from logits of whole texts in one forward pass each.

    perplexity = exp(nats / predicted tokens),   bits per byte = nats / ln 2 / bytes of text

The first predicts over tokens and depends on the tokenizer; the second does not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

from millrace_bench.eval.backend import Perplexity
from millrace_bench.pools import PAGE, model_pool
from millrace_bench.shard import pages_of, step_inputs

Logits = Callable[[list[int]], Tensor]  # T token ids -> float32 [T, vocab]


def measure(texts: Sequence[str], token_ids: Sequence[list[int]], logits: Logits) -> Perplexity:
    """`token_ids` of each text, the beginning-of-sequence token included."""
    nats = 0.0
    for ids in token_ids:
        nats += F.cross_entropy(logits(ids)[:-1].float(), torch.tensor(ids[1:]), reduction="sum").item()
    tokens = sum(len(ids) - 1 for ids in token_ids)
    size = sum(len(text.encode()) for text in texts)
    return Perplexity(math.exp(nats / tokens), nats / math.log(2) / size, tokens)


def checkpoint_logits(
    folder: Path,
    device: str,
    dtype: torch.dtype,
    *,
    keep_quantised: bool | None = None,
    decoded: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> Logits:
    """Millrace's own model. Raises as `load_model`.

    Args:
        keep_quantised: as load_model has it.
        kv_dtype: of the pool, None: `dtype`. Otherwise a text goes in chunks, which read the pool: a whole prompt would
            attend to its own keys as they were before they were stored.
        decoded: so many tokens at the end are steps of their own, as outputs are; the others are one prompt.
    """
    model = load_model(folder, ParallelDims(), torch.device(device), dtype, keep_quantised=keep_quantised)

    @torch.inference_mode()
    def logits(ids: list[int]) -> Tensor:
        table = torch.arange(1, pages_of([len(ids)]) + 1).view(1, -1)
        kv = model_pool(model.config, table.numel() + 1, kv_dtype or dtype, device).view()
        chunks = range(0, len(ids) - decoded, PAGE) if kv_dtype else [0]
        starts = sorted({*chunks, *range(max(len(ids) - decoded, 1), len(ids))})
        steps = [_step(ids, start, end, table, torch.device(device)) for start, end in pairwise((*starts, len(ids)))]
        return torch.cat([model.logits(model.forward(step, kv)) for step in steps]).cpu()

    return logits


def _step(ids: list[int], start: int, end: int, table: Tensor, device: torch.device) -> ForwardInput:
    """Tokens [start, end) of a sequence, all of which are sampled; its KV before them is there."""
    tokens = torch.tensor(ids[start:end])
    inputs = step_inputs(tokens, (end - start,), (end,), int(start > 0), table, device)
    return replace(inputs, sample_rows=inputs.positions - start)
