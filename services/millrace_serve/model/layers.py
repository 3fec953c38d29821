"""The parts of every layer. Letters: T tokens, D hidden size, I intermediate size of this rank."""

from __future__ import annotations

import torch.nn.functional as F
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.linear import linear
from millrace_kernels.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm, rms_norm_quant
from millrace_kernels.silu_mul import silu_mul, silu_mul_quant
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Part, Weights, stack_rows


class RmsNorm:
    """`plain`: whether the consumer of `operand` reads the plain rows beside their FP8 form."""

    def __init__(self, ckpt: Weights, name: str, dim: int, eps: float, *, plain: bool = True) -> None:
        self.weight = ckpt.tensor(f"{name}.weight", (dim,))
        self.eps, self.quant, self.plain = eps, ckpt.fp8, plain

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)"""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def operand(self, x: Tensor, residual: Tensor | None) -> tuple[Operand, Tensor]:
        """As `add`, in the forms that products read; without a residual (norm(x), x)."""
        if residual is None:
            if self.quant:
                return rms_norm_quant(x, self.weight, self.eps, plain=self.plain), x
            return Operand(self(x), None), x
        if self.quant:
            return add_rms_norm_quant(x, residual, self.weight, self.eps, plain=self.plain)
        normed, residual = self.add(x, residual)
        return Operand(normed, None), residual


class Mlp:
    """down(silu(gate x) * up x), intermediate dimension sharded over TP: the result is this rank's part of a sum."""

    def __init__(self, ckpt: Weights, dims: ParallelDims, prefix: str, hidden: int, intermediate: int) -> None:
        size = check_divides(f"{prefix} intermediate size", intermediate, "tp", dims.tp)
        shard = (dims.tp_rank * size, (dims.tp_rank + 1) * size)
        shape = (intermediate, hidden)
        gate_up = [ckpt.matrix(f"{prefix}.{name}.weight", shape, Part(rows=shard)) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = stack_rows(gate_up, ckpt.dtype)  # [2I, D]
        self.down_proj = ckpt.matrix(f"{prefix}.down_proj.weight", (hidden, intermediate), Part(cols=shard))  # [D, I]

    def partial(self, h: Operand) -> Tensor:
        activate = silu_mul_quant if isinstance(self.down_proj, Fp8) else silu_mul
        return linear(activate(linear(h, self.gate_up_proj)), self.down_proj)


class VocabParallel:
    """Rows of the vocabulary [first, first + size) of this TP rank; the last may hold fewer than ceil(vocab / tp)."""

    def __init__(self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, name: str) -> None:
        self.dims = dims
        self.vocab_size = config.vocab_size
        self.per_rank = -(-config.vocab_size // dims.tp)
        self.first = min(dims.tp_rank * self.per_rank, config.vocab_size)
        stop = min(self.first + self.per_rank, config.vocab_size)
        self.weight = ckpt.tensor(name, (config.vocab_size, config.hidden_size), Part(rows=(self.first, stop)))

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [T] -> [T, D], complete on every rank of the replica."""
        if self.dims.tp == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        held = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local.where(held, 0), self.weight)
        return self.dims.tp_all_reduce(rows.masked_fill(~held.unsqueeze(1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> float32 [S, vocab_size], complete on every rank of the replica."""
        part = linear(hidden, self.weight)
        if self.dims.tp == 1:
            return part.float()
        part = F.pad(part, (0, self.per_rank - part.shape[1]))  # ranks gather equal widths
        whole = self.dims.tp_all_gather(part)  # [tp, S, per_rank]
        return whole.transpose(0, 1).flatten(1)[:, : self.vocab_size].float()
