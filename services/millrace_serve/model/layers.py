"""The parts of every layer. Letters: T tokens, D hidden size, I intermediate size of this rank."""

import torch
import torch.nn.functional as F
from millrace_kernels.embed_part import embed_part
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.linear import linear
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.silu_mul import silu_mul
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.quantised import stack_rows
from millrace_serve.model.weights import Part, Weights


class RmsNorm:
    """What the consumer of `operand` reads: the plain rows, with `quant` and an FP8 model also or only the FP8 form."""

    WEIGHTS = ("weight",)

    def __init__(
        self, ckpt: Weights, name: str, dim: int, eps: float, *, plain: bool = True, quant: bool = True
    ) -> None:
        self.weight = ckpt.tensor(f"{name}.weight", (dim,))
        self.eps, self.quant, self.plain = eps, quant and ckpt.kept.fp8, plain

    def operand(self, x: Tensor, residual: Tensor | None) -> tuple[Operand, Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x)."""
        return rms_norm(x, residual, self.weight, self.eps, quant=self.quant, plain=self.plain)


class Mlp:
    """down(silu(gate x) * up x), intermediate dimension sharded over TP: the result is this rank's part of a sum."""

    WEIGHTS = "gate_up_proj", "down_proj"

    def __init__(self, ckpt: Weights, dims: ParallelDims, prefix: str, hidden: int, intermediate: int) -> None:
        size = check_divides(f"{prefix} intermediate size", intermediate, "tp", dims.tp)
        shard = (dims.tp_rank * size, (dims.tp_rank + 1) * size)
        shape = (intermediate, hidden)
        gate_up = [ckpt.matrix(f"{prefix}.{name}.weight", shape, Part(rows=shard)) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = stack_rows(gate_up, ckpt.dtype)  # [2I, D]
        self.down_proj = ckpt.matrix(f"{prefix}.down_proj.weight", (hidden, intermediate), Part(cols=shard))  # [D, I]

    def partial(self, h: Operand) -> Tensor:
        return linear(silu_mul(linear(h, self.gate_up_proj), quant=isinstance(self.down_proj, Fp8)), self.down_proj)


class VocabParallel:
    """Rows of the vocabulary [first, first + size) of this TP rank; the last may hold fewer than ceil(vocab / tp)."""

    WEIGHTS = ("weight",)

    def __init__(self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, name: str) -> None:
        self.dims = dims
        self.vocab_size = config.vocab_size
        self.per_rank = -(-config.vocab_size // dims.tp)
        self.first = min(dims.tp_rank * self.per_rank, config.vocab_size)
        stop = min(self.first + self.per_rank, config.vocab_size)
        self.weight = ckpt.tensor(name, (config.vocab_size, config.hidden_size), Part(rows=(self.first, stop)))

    def embed_partial(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [T] -> [T, D], this rank's part of a sum."""
        if self.dims.tp == 1:
            return F.embedding(token_ids, self.weight)
        return embed_part(token_ids, self.weight, self.first)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> float32 [S, vocab_size], complete on every rank of the replica."""
        part = linear(hidden, self.weight)
        if self.dims.tp == 1:
            return part.float()
        if part.shape[1] < self.per_rank:  # ranks gather equal widths
            part = F.pad(part, (0, self.per_rank - part.shape[1]))
        whole = self.dims.tp_all_gather(part).transpose(0, 1)  # [S, tp, per_rank]
        whole = whole.to(torch.float32, memory_format=torch.contiguous_format).flatten(1)
        return whole[:, : self.vocab_size].contiguous()
