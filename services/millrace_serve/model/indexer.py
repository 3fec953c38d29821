"""The lightning indexer of a layer (DeepSeek-V3.2 paper, eq. 1): the cached tokens that each token attends to.

    q_j = rope(W_IQ c_q)_j        k = rope(layernorm(W_IK h))        w = W_w h / sqrt(H I)
    I_ts = sum_j w_tj relu(q_tj . k_s)        token t attends to the index_topk tokens s <= t with the largest I_ts

Every tp rank has the whole indexer: equal inputs give it equal choices. RoPE rotates the first R columns, and unlike
attention's in two halves, not in neighbouring pairs.

Letters: T tokens, H index heads, I index_head_dim, D hidden size, K index_topk.
"""

import torch
import torch.nn.functional as F
from millrace_kernels.fp8 import Operand
from millrace_kernels.indexer import chosen_rows, index_logits, index_queries, index_store
from millrace_kernels.linear import linear
from torch import Tensor

from millrace_serve.model.attn_step import AttnStep
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.sparse_step import IndexPool, SparseGroup
from millrace_serve.model.weights import Weights

LOGITS_AT_A_TIME = 1 << 25  # 128 MiB of logits of a prompt chunk


class Indexer:
    WEIGHTS = "wq_b", "wk", "k_norm", "weights_proj"

    def __init__(self, ckpt: Weights, config: ModelConfig, prefix: str, layer: int) -> None:
        """`layer`: of the KV pool."""
        assert config.q_lora_rank is not None
        self.layer, self.topk = layer, config.index_topk
        self.num_heads, self.width = config.index_n_heads, config.index_head_dim
        hidden, f32 = config.hidden_size, torch.float32
        self.wq_b = ckpt.matrix(f"{prefix}.wq_b.weight", (self.num_heads * self.width, config.q_lora_rank))
        self.wk = ckpt.matrix(f"{prefix}.wk.weight", (self.width, hidden))
        weight, bias = (ckpt.tensor(f"{prefix}.k_norm.{name}", (self.width,), dtype=f32) for name in ("weight", "bias"))
        self.k_norm = weight, bias
        weights_proj = ckpt.tensor(f"{prefix}.weights_proj.weight", (self.num_heads, hidden), dtype=f32)
        self.weights_proj = weights_proj * (self.num_heads * self.width) ** -0.5

    def __call__(self, h: Operand, q_low: Operand, step: AttnStep) -> Tensor | None:
        """Stores the keys of all rows; h [T, D] must be plain too, q_low is c_q [T, Q].

        Returns: int32 [T of step.sparse, K], the rows of the pool that each attends to, as in `mla_sparse`. None: all
            attend to all of their keys.
        """
        pool = step.index
        assert pool is not None and h.plain is not None
        cache = pool.layer(self.layer)
        index_store(cache, step.inputs.kv_slots, linear(h, self.wk), self.k_norm, step.cos, step.sin)
        if not step.sparse:
            return None
        rows = slice(0, step.sparse[-1].rows.stop)
        q = linear(q_low, self.wq_b)[rows].unflatten(1, (self.num_heads, self.width))
        weights = F.linear(h.plain[rows].float(), self.weights_proj)
        q, weights = index_queries(q, weights, step.cos[rows], step.sin[rows], exact=pool.exact)
        parts = [part for group in step.sparse for part in self._choose(group, q, weights, pool)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choose(self, group: SparseGroup, q: Tensor, weights: Tensor, pool: IndexPool) -> list[Tensor]:
        """int32 [T, K] of parts of the group, in order."""
        count, pages, page_size, parts = len(group.lens), group.page_table.shape[1], pool.page_size, []
        block = count if group.page_table.shape[0] == count else max(LOGITS_AT_A_TIME // (pages * page_size), 1)
        for lens, first in zip(group.lens.split(block), range(group.rows.start, group.rows.stop, block), strict=True):
            rows, cache = slice(first, first + len(lens)), pool.layer(self.layer)
            logits = index_logits(q[rows], weights[rows], cache, group.page_table, lens, group.plan)
            parts.append(chosen_rows(logits, lens, self.topk, group.page_table, page_size, pool.page_rows))
        return parts
