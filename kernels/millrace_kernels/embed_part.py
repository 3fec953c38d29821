"""The embedding of tokens by one rank's part of the vocabulary; the sum over ranks is the whole."""

import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import implementation


def embed_part(token_ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """token_ids int64 [T], weight [N, D] of the tokens first to first + N - 1 -> [T, D], 0 for other tokens."""
    if run := implementation("embed_part.embed_part", token_ids.device, token_ids.shape[0]):
        return run(token_ids, weight, first)
    local = token_ids - first
    held = (local >= 0) & (local < weight.shape[0])
    return F.embedding(local.where(held, 0), weight).masked_fill(~held.unsqueeze(1), 0.0)
