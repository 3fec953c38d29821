"""Logits -> tokens.

    l = logits + logit_bias (-inf on stop tokens before min_tokens)
    repetition (HF, arXiv:1909.05858): tokens of prompt or outputs: l = l / r if l > 0 else l * r
    presence, frequency (OpenAI):      l -= presence * [count > 0] + frequency * count, over outputs only
    temperature 0: argmax l, the smallest id of equals
    else p = softmax(l / temperature), restricted in this order and renormalised after each:
        top_k  the k most likely, smaller ids first among equals
        top_p  the shortest prefix of the sorted rest whose mass reaches top_p
        min_p  p >= min_p * max p
    draw by Gumbel-max: argmax log p_t + g_t, g_t = -log(-log(u)), u = hash(seed, output position, t)

The hash is integer arithmetic, so the noise of a (seed, position, token) is the same in every batch, attempt, worker
and device. Logprobs are those of softmax(logits), before everything above. Letters: S sampled rows, V vocabulary, N
rows with penalties.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.plan import StepOutput
from millrace_serve.engine.sampling_batch import Penalties, SamplingBatch

M32 = 0xFFFFFFFF


class TokenTables:
    """Which tokens a sequence has seen; one row for each sequence that has penalties. Grows when rows are needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # of outputs

    def join(self, penalties: Penalties) -> None:
        for row, prompt, outputs in penalties.joined:
            self._grow(row + 1)
            self._in_prompt[row] = False
            self._in_prompt[row, torch.from_numpy(prompt).to(self._in_prompt.device)] = True
            self._counts[row] = torch.bincount(
                torch.from_numpy(outputs).to(self._counts.device), minlength=self._counts.shape[1]
            )

    def apply(self, logits: Tensor, penalties: Penalties) -> None:
        """In place on logits [S, V]."""
        device = logits.device
        rows, samples = _to(penalties.rows, device), _to(penalties.samples, device)
        counts = self._counts[rows]
        x = logits[samples]
        repetition, presence, frequency = (
            _to(column, device)[:, None] for column in (penalties.repetition, penalties.presence, penalties.frequency)
        )
        x = torch.where(self._in_prompt[rows] | (counts > 0), torch.where(x > 0, x / repetition, x * repetition), x)
        logits[samples] = x - presence * (counts > 0) - frequency * counts

    def add(self, tokens: Tensor, penalties: Penalties) -> None:
        """Count the tokens [S] just sampled."""
        device = tokens.device
        self._counts[_to(penalties.rows, device), tokens[_to(penalties.samples, device)]] += 1

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - self._counts.shape[0]
        if missing > 0:
            missing = max(missing, self._counts.shape[0])
            shape = (missing, self._counts.shape[1])
            self._counts = torch.cat((self._counts, self._counts.new_zeros(shape)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(shape)))


def sample(logits: Tensor, batch: SamplingBatch, tables: TokenTables) -> tuple[Tensor, Tensor | None]:
    """logits float32 [S, V], overwritten -> tokens int64 [S]; log-softmax of the raw logits if anybody wants it."""
    raw = torch.log_softmax(logits, dim=-1) if batch.num_logprobs >= 0 else None
    if batch.bias is not None:
        samples, tokens, values = (_to(column, logits.device) for column in batch.bias)
        logits.index_put_((samples, tokens), values, accumulate=True)
    if batch.penalties is not None:
        tables.join(batch.penalties)
        tables.apply(logits, batch.penalties)
    chosen = logits.argmax(dim=-1)
    drawn = np.flatnonzero(batch.temperature > 0)
    if drawn.size:
        rows = _to(drawn, logits.device)
        chosen[rows] = _draw(logits if drawn.size == len(chosen) else logits[rows], batch, drawn)
    if batch.penalties is not None:
        tables.add(chosen, batch.penalties)
    return chosen, raw


def to_output(tokens: Tensor, raw: Tensor | None, num_logprobs: int) -> StepOutput:
    output = StepOutput(tokens.cpu().numpy())
    if raw is not None:
        top = raw.topk(num_logprobs, dim=-1)
        output.logprobs = raw.gather(1, tokens[:, None])[:, 0].cpu().numpy()
        output.top_ids, output.top_logprobs = top.indices.cpu().numpy(), top.values.cpu().numpy()
    return output


def gumbel_noise(seeds: Tensor, output_index: Tensor, vocab_size: int) -> Tensor:
    """int64 [S] (u64 bits), int64 [S] -> float32 [S, V]."""
    tokens = torch.arange(vocab_size, device=seeds.device)
    key = _mix32(_mix32(seeds & M32) ^ ((seeds >> 32) & M32))
    key = _mix32(key ^ _mix32(output_index & M32))
    bits = _mix32(_mix32(key[:, None] ^ _mix32(tokens)[None, :]) + key[:, None])
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


def _draw(logits: Tensor, batch: SamplingBatch, rows: np.ndarray) -> Tensor:
    device = logits.device
    logits = logits / _to(batch.temperature[rows], device)[:, None]
    top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
    if (top_k > 0).any() or (top_p < 1).any():
        logits = _keep_top(logits, _to(top_k, device), _to(top_p, device))
    if (min_p > 0).any():
        floor = logits.amax(dim=-1, keepdim=True) + torch.log(_to(min_p, device))[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    seeds, index = _to(batch.seeds[rows].view(np.int64), device), _to(batch.output_index[rows], device)
    return (logits + gumbel_noise(seeds, index, logits.shape[1])).argmax(dim=-1)


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


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
