"""Logits -> tokens.

    l = logits, -inf on what the grammar does not allow
    l = l + logit_bias (-inf on stop tokens before min_tokens)
    repetition (HF, arXiv:1909.05858): tokens of prompt or outputs: l = l / r if l > 0 else l * r
    presence, frequency (OpenAI):      l -= presence * [count > 0] + frequency * count, over outputs only
    temperature, top_k, top_p, min_p, draw: millrace_kernels.sample_tokens

Logprobs are those of softmax(logits), before everything above. Control flow reads the host arrays and kernels read the
device copies, so nothing here waits for the device. Letters: R sampled rows, V vocabulary, N rows with penalties, k
tokens of earlier rows (Slots.tokens_before).
"""

import torch
from millrace_kernels.sample_tokens import SampleParams, sample_tokens
from torch import Tensor

from millrace_serve.engine.step.sampling_batch import DeviceSampling, HostSampling, Penalties


class TokenTables:
    """The tokens of each sequence with penalties, one row each. Grows when rows are needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # of outputs

    def join(self, penalties: Penalties[Tensor]) -> None:
        for row, prompt, outputs in penalties.joined:
            self._grow(row + 1)
            self._in_prompt[row].zero_().index_fill_(0, prompt, True)
            ones = torch.ones(outputs.shape, dtype=self._counts.dtype, device=outputs.device)
            self._counts[row].zero_().index_add_(0, outputs, ones)

    def apply(self, logits: Tensor, penalties: Penalties[Tensor], before: Tensor) -> None:
        """In place on logits [R, V]. `before`: int64 [R, k], the tokens that a row takes for outputs, else -1."""
        counts = self._counts[penalties.rows]
        if before.shape[1]:
            tokens = before[penalties.samples]
            counts = counts.scatter_add(1, tokens.clamp(min=0), (tokens >= 0).to(counts.dtype))
        seen = self._in_prompt[penalties.rows] | (counts > 0)
        x, repetition = logits[penalties.samples], penalties.repetition[:, None]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - penalties.presence[:, None] * (counts > 0) - penalties.frequency[:, None] * counts
        logits[penalties.samples] = x

    def add(self, tokens: Tensor, accepted: Tensor, penalties: Penalties[Tensor]) -> None:
        """Count the tokens [R] just sampled, as far as they are accepted (bool [R])."""
        rows, samples = penalties.rows, penalties.samples
        self._counts.index_put_((rows, tokens[samples]), accepted[samples].to(self._counts.dtype), accumulate=True)

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - self._counts.shape[0]
        if missing > 0:
            missing = max(missing, self._counts.shape[0])
            shape = (missing, self._counts.shape[1])
            self._counts = torch.cat((self._counts, self._counts.new_zeros(shape)))
            self._in_prompt = torch.cat((self._in_prompt, self._in_prompt.new_zeros(shape)))


def sample(
    logits: Tensor,
    host: HostSampling,
    device: DeviceSampling,
    output_index: Tensor,
    before: Tensor | None,
    tables: TokenTables,
) -> tuple[Tensor, Tensor | None]:
    """logits float32 [R, V], overwritten -> tokens int64 [R]; log-softmax of the raw logits if a request wants it.

    Args:
        host, device: the same batch twice.
        output_index: int64 [R], 0-based output position in the room
        before: int64 [R, k], the tokens that a row takes for outputs, else -1; needed with penalties alone
    """
    raw = torch.log_softmax(logits, dim=-1) if host.num_logprobs >= 0 else None
    if device.grammar is not None:
        _restrict(logits, *device.grammar)
    if device.bias is not None:
        bias = device.bias
        values = bias.values.masked_fill(output_index[bias.samples] >= bias.until, 0.0)
        logits.index_put_((bias.samples, bias.tokens), values, accumulate=True)
    if device.penalties is not None:
        assert before is not None, "penalties count the tokens of earlier rows"
        tables.join(device.penalties)
        tables.apply(logits, device.penalties, before)
    drawn = host.drawn
    filters = (host.top_k[drawn] > 0) | (host.top_p[drawn] < 1) | (host.min_p[drawn] > 0)
    params = SampleParams(device.temperature, device.top_k, device.top_p, device.min_p, device.seeds)
    return sample_tokens(logits, params, output_index, draws=len(drawn) > 0, filters=bool(filters.any())), raw


def results(tokens: Tensor, raw: Tensor | None, num_logprobs: int) -> dict[str, Tensor]:
    """The parts of plan.StepOutput that belong to sampled rows."""
    if raw is None:
        return {"tokens": tokens}
    top = raw.topk(num_logprobs, dim=-1)
    logprobs = raw.gather(1, tokens[:, None])[:, 0]
    return {"tokens": tokens, "logprobs": logprobs, "top_ids": top.indices, "top_logprobs": top.values}


def _restrict(logits: Tensor, samples: Tensor, masks: Tensor) -> None:
    """In place: -inf on tokens whose bit of masks int32 [G, ceil(V / 32)] is 0."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (bits & 1).flatten(1)[:, : logits.shape[1]]
    logits[samples] = logits[samples].masked_fill(allowed == 0, -torch.inf)
