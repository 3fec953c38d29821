"""Inputs of sample_tokens: rows of every kind side by side."""

import itertools
from typing import Any

import torch
from torch import Tensor

# temperature, top_k, top_p, min_p
KINDS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),  # greedy: its filters do not matter
    (0.7, 40, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (1.5, 200, 0.8, 0.02),
    (1e-4, 0, 0.95, 0.0),
    (100.0, 0, 0.99, 0.0),
    (1.0, 1 << 30, 0.9999, 1.0),
)


def draw_inputs(num: int, vocab: int, seed: int = 0, device: str = "cpu", filters: bool = True) -> dict[str, Any]:
    """`sample_tokens`' arguments. Logits are a few likely tokens over many unlikely ones, every seventh not allowed."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, vocab, generator=generator) * 3
    logits[:, 3::7] = -torch.inf
    kinds = list(itertools.islice(itertools.cycle(KINDS), num))
    if not filters:
        kinds = [(kind[0], 0, 1.0, 0.0) for kind in kinds]
    floats = torch.tensor([(kind[0], kind[2], kind[3]) for kind in kinds]).reshape(num, 3)
    given = {
        "logits": logits,
        "temperature": floats[:, 0].contiguous(),
        "top_k": torch.tensor([kind[1] for kind in kinds], dtype=torch.int64),
        "top_p": floats[:, 1].contiguous(),
        "min_p": floats[:, 2].contiguous(),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator),
        "output_index": torch.randint(0, 4096, (num,), generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in given.items()} | {"filters": filters}


def sample(given: dict[str, Any]) -> Tensor:
    """int64 [S], `sample_tokens` of what `draw_inputs` gives."""
    from millrace_kernels.sample_tokens import SampleParams, sample_tokens

    params = SampleParams(*(given[name] for name in SampleParams._fields))
    rest = {name: value for name, value in given.items() if name not in SampleParams._fields}
    return sample_tokens(params=params, **rest)


def kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [S, V] by the reference, of rows that are drawn."""
    from millrace_kernels.sample_tokens import filtered

    return filtered(logits / temperature[:, None], top_k, top_p, min_p) > -torch.inf


def kept_by_bounds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [S, V] by our kernel."""
    from millrace_kernels.triton.sample_filter import bounds

    values, lasts = bounds(logits, temperature, top_k, top_p, min_p)
    y, ids = logits / temperature[:, None], torch.arange(logits.shape[1], device=logits.device)
    inside = (y > values[:, None]) | ((y == values[:, None]) & (ids <= lasts[:, None]))
    return inside & (y > -torch.inf)
