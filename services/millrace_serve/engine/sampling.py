"""Logits -> tokens.

    l = logits, -inf on what the grammar does not allow
    l = l + logit_bias (-inf on stop tokens before min_tokens)
    repetition (HF, arXiv:1909.05858): tokens of prompt or outputs: l = l / r if l > 0 else l * r
    presence, frequency (OpenAI):      l -= presence * [count > 0] + frequency * count, over outputs only
    temperature 0: argmax l, the smallest id of equals
    else p = softmax(l / temperature), restricted in this order and renormalised after each:
        top_k  the k most likely, smaller ids first among equals
        top_p  the shortest prefix of the sorted rest whose mass reaches top_p
        min_p  p >= min_p * max p
    draw by Gumbel-max: argmax log p_t + g_t, g_t = -log(-log(u)), u = hash(seed, output position, t)

The hash is integer arithmetic, so the noise of a (seed, position, token) is the same in every batch, attempt, worker
and device. Logprobs are those of softmax(logits), before everything above. Nothing here waits for the device: what is
decided is decided on the host's arrays, and their twin on the device is computed with. Letters: S sampled rows, V
vocabulary, N rows with penalties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace_serve.engine.sampling_batch import DeviceSampling, HostSampling, Penalties

M32 = 0xFFFFFFFF


class TokenTables:
    """Which tokens a sequence has seen; one row for each sequence that has penalties. Grows when rows are needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # of outputs

    def join(self, penalties: Penalties[Tensor]) -> None:
        for row, prompt, outputs in penalties.joined:
            self._grow(row + 1)
            self._in_prompt[row].zero_().index_fill_(0, prompt, True)
            ones = torch.ones(outputs.shape, dtype=self._counts.dtype, device=outputs.device)
            self._counts[row].zero_().index_add_(0, outputs, ones)

    def apply(self, logits: Tensor, penalties: Penalties[Tensor]) -> None:
        """In place on logits [S, V]."""
        counts = self._counts[penalties.rows]
        seen = self._in_prompt[penalties.rows] | (counts > 0)
        x, repetition = logits[penalties.samples], penalties.repetition[:, None]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - penalties.presence[:, None] * (counts > 0) - penalties.frequency[:, None] * counts
        logits[penalties.samples] = x

    def add(self, tokens: Tensor, penalties: Penalties[Tensor]) -> None:
        """Count the tokens [S] just sampled."""
        self._counts[penalties.rows, tokens[penalties.samples]] += 1

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - self._counts.shape[0]
        if missing > 0:
            missing = max(missing, self._counts.shape[0])
            shape = (missing, self._counts.shape[1])
            self._counts = torch.cat((self._counts, self._counts.new_zeros(shape)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(shape)))


def sample(
    logits: Tensor, host: HostSampling, device: DeviceSampling, tables: TokenTables
) -> tuple[Tensor, Tensor | None]:
    """logits float32 [S, V], overwritten -> tokens int64 [S]; log-softmax of the raw logits if anybody wants it.

    Args:
        host, device: the same batch twice.
    """
    raw = torch.log_softmax(logits, dim=-1) if host.num_logprobs >= 0 else None
    if device.grammar is not None:
        _restrict(logits, *device.grammar)
    if device.bias is not None:
        samples, tokens, values = device.bias
        logits.index_put_((samples, tokens), values, accumulate=True)
    if device.penalties is not None:
        tables.join(device.penalties)
        tables.apply(logits, device.penalties)
    chosen = _choose(logits, host, device)
    if device.penalties is not None:
        tables.add(chosen, device.penalties)
    return chosen, raw


def results(tokens: Tensor, raw: Tensor | None, num_logprobs: int) -> dict[str, Tensor]:
    """What plan.StepOutput is made of, on the device."""
    if raw is None:
        return {"tokens": tokens}
    top = raw.topk(num_logprobs, dim=-1)
    logprobs = raw.gather(1, tokens[:, None])[:, 0]
    return {"tokens": tokens, "logprobs": logprobs, "top_ids": top.indices, "top_logprobs": top.values}


def gumbel_noise(seeds: Tensor, output_index: Tensor, vocab_size: int) -> Tensor:
    """int64 [S] (u64 bits), int64 [S] -> float32 [S, V]."""
    tokens = torch.arange(vocab_size, device=seeds.device)
    key = _mix32(_mix32(seeds & M32) ^ ((seeds >> 32) & M32))
    key = _mix32(key ^ _mix32(output_index & M32))
    bits = _mix32(_mix32(key[:, None] ^ _mix32(tokens)[None, :]) + key[:, None])
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def _restrict(logits: Tensor, samples: Tensor, masks: Tensor) -> None:
    """In place: -inf on tokens whose bit of masks int32 [G, ceil(V / 32)] is 0."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]]
    logits[samples] = logits[samples].masked_fill(allowed == 0, -torch.inf)


def _choose(logits: Tensor, host: HostSampling, device: DeviceSampling) -> Tensor:
    """Argmax of greedy rows, a draw from the others."""
    if len(host.drawn) == len(logits):
        return _draw(logits, host, device, slice(None))
    chosen = logits.argmax(dim=-1)
    if len(host.drawn):
        chosen[device.drawn] = _draw(logits[device.drawn], host, device, device.drawn)
    return chosen


def _draw(logits: Tensor, host: HostSampling, device: DeviceSampling, rows: Tensor | slice) -> Tensor:
    """logits of the rows `host.drawn`, which are `rows` on the device."""
    logits = logits / device.temperature[rows][:, None]
    drawn = host.drawn
    if (host.top_k[drawn] > 0).any() or (host.top_p[drawn] < 1).any():
        logits = _keep_top(logits, device.top_k[rows], device.top_p[rows])
    if (host.min_p[drawn] > 0).any():
        floor = logits.amax(dim=-1, keepdim=True) + torch.log(device.min_p[rows])[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    noise = gumbel_noise(device.seeds[rows], device.output_index[rows], logits.shape[1])
    return (logits + noise).argmax(dim=-1)


def _keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside of top_k, then of top_p of what is left."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    limit = torch.where(top_k > 0, top_k, values.shape[1])[:, None]
    values = values.masked_fill(rank >= limit, -torch.inf)
    probs = values.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    values = values.masked_fill((mass_before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0), -torch.inf)
    return torch.empty_like(values).scatter_(1, order, values)


def _mix32(x: Tensor) -> Tensor:
    """Bijection of u32 held in int64 (finalizer of MurmurHash3)."""
    x = x & M32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & M32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M32
    return x ^ (x >> 16)
