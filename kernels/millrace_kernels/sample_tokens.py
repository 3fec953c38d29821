"""Logits -> tokens: filters, temperature and a draw that can be repeated.

    temperature 0: argmax l, the smallest id of equals
    else y = l / temperature, p = softmax(y), restricted in this order and renormalised after each:
        top_k  the k most likely, smaller ids first among equals
        top_p  the shortest prefix of the sorted rest whose mass reaches top_p, one token at least
        min_p  p >= min_p * max p
    draw by Gumbel-max: argmax y_t + g_t, g_t = -log(-log(u)), u = hash(seed, output position, t)

The hash is integer arithmetic and g is rounded once from float64, so the noise of a (seed, position, token) is the same
in every batch and on every device. Letters: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_index: Tensor,
    *,
    draws: bool = True,
    filters: bool = True,
) -> Tensor:
    """logits float32 [S, V], -inf where a token is not allowed -> int64 [S].

    Args:
        temperature: float32 [S], 0 is greedy; top_p, min_p: float32 [S]; top_k: int64 [S], 0 keeps all.
        seeds: int64 [S], the bits of a u64; output_index: int64 [S], the output's position in its sequence.
        draws: False when every temperature is 0.
        filters: False when no drawn row has a top_k, top_p or min_p. The host decides both.
    Notes:
        Nothing here waits for a GPU. A row of nothing but -inf gives token 0.
    """
    rows = logits.shape[:1]
    assert all(x.shape == rows for x in (temperature, top_k, top_p, min_p, seeds, output_index)), logits.shape
    return implementation("sample_tokens.sample_tokens", logits.device, logits.shape[0])(
        logits, temperature, top_k, top_p, min_p, seeds, output_index, draws=draws, filters=filters
    )
