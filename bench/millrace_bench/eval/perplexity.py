"""Perplexity of the held-out texts under a checkpoint, from logits of whole texts in one forward pass each.

    perplexity = exp(nats / predicted tokens),   bits per byte = nats / ln 2 / bytes of text

The first predicts over tokens and depends on the tokenizer; the second does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

from millrace_bench.eval.backend import Perplexity

Logits = Callable[[list[int]], Tensor]  # T token ids -> float32 [T, vocab]
PAGE = 64


def measure(texts: Sequence[str], token_ids: Sequence[list[int]], logits: Logits) -> Perplexity:
    """`token_ids` of each text, the beginning-of-sequence token included."""
    nats = 0.0
    for ids in token_ids:
        nats += F.cross_entropy(logits(ids)[:-1].float(), torch.tensor(ids[1:]), reduction="sum").item()
    tokens = sum(len(ids) - 1 for ids in token_ids)
    size = sum(len(text.encode()) for text in texts)
    return Perplexity(math.exp(nats / tokens), nats / math.log(2) / size, tokens)


def checkpoint_logits(folder: Path, device: str, dtype: torch.dtype) -> Logits:
    """Millrace's own model. Raises as `load_model`."""
    model = load_model(folder, ParallelDims(), torch.device(device), dtype)

    @torch.inference_mode()
    def logits(ids: list[int]) -> Tensor:
        pages = -(-len(ids) // PAGE)
        shape = (pages + 1, model.config.num_kv_layers, PAGE, model.config.kv_row_dim)
        kv = torch.zeros(shape, dtype=dtype, device=device)
        return model.logits(model.forward(_one_prompt(ids, pages, device), kv)).cpu()

    return logits


def _one_prompt(ids: list[int], pages: int, device: str) -> ForwardInput:
    """The whole prompt as one chunk, on pages 1, 2, ..."""
    count = len(ids)
    plan = AttnPlan(
        num_decode=0,
        cu_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        page_table=torch.arange(1, pages + 1, dtype=torch.int32, device=device).view(1, -1),
        q_lens_host=(count,),
        seq_lens_host=(count,),
    )
    positions = torch.arange(count, device=device)
    return ForwardInput(
        token_ids=torch.tensor(ids, device=device),
        positions=positions,
        kv_slots=positions + PAGE,
        attn=plan,
        sample_rows=positions,
        num_tokens=count,
    )
