"""Multi-head latent attention (DeepSeek-V2 paper, section 2.1; V3 paper, eq. 1-11).

    c_q = norm(W_DQ h)      [q_nope | q_pe] = W_UQ c_q       c_kv = norm(W_DKV h)      k_pe = rope(W_KR h)
    k_nope = W_UK c_kv      v = W_UV c_kv                    o = softmax(scale (q_nope k_nope + q_pe k_pe)) v

Only [c_kv | k_pe] is cached. Expanded, k and v are computed per head; absorbed, W_UK moves to the query and W_UV to the
output, so all heads attend to the cached rows themselves. model/attn_step.py chooses. With sparse attention (V3.2)
rows with many keys are absorbed and attend to those that model/indexer.py chooses.

Letters: T tokens, B sequences, H heads of this rank, C kv_lora_rank, R rope dim, N nope dim, V v head dim.
"""

import torch
from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.int8 import Matrix
from millrace_kernels.kv_gather import kv_gather
from millrace_kernels.linear import linear
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_absorb import absorb_q, project_v, project_v_quant
from millrace_kernels.mla_decode import mla_decode
from millrace_kernels.mla_expand import expand_kv, rope_q
from millrace_kernels.mla_prefill import mla_prefill
from millrace_kernels.mla_qkv import mla_qkv_norm
from millrace_kernels.mla_sparse import mla_sparse
from torch import Tensor

from millrace_serve.model.attn_step import AbsorbedGroup, AttnStep
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.context_parallel.attention_step import ContextParallelStep, KeyPart
from millrace_serve.model.indexer import Indexer
from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import plain, stack_rows
from millrace_serve.model.weights import Part, Weights
from millrace_serve.model.yarn import softmax_scale


class Mla:
    WEIGHTS = (
        *("q_kv_a_proj", "q_a_layernorm", "q_b_proj", "indexer", "kv_a_layernorm", "kv_b_proj"),
        *("w_uk", "w_uv", "w_uk_fp8", "w_uv_fp8", "o_proj"),
    )

    def __init__(self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, layer: int) -> None:
        self.config, self.dims, prefix = config, dims, f"model.layers.{layer}.self_attn"
        self.scale = softmax_scale(config)
        self.num_heads = config.num_attention_heads // dims.tp
        self.eps, hidden = config.rms_norm_eps, config.hidden_size
        total = config.num_attention_heads

        def heads(dim: int) -> tuple[int, int]:
            return dims.tp_rank * self.num_heads * dim, (dims.tp_rank + 1) * self.num_heads * dim

        q_shape, q_part = total * config.qk_head_dim, Part(rows=heads(config.qk_head_dim))
        self.q_a_layernorm, self.q_b_proj = None, None
        if config.q_lora_rank is None:
            q_first = ckpt.matrix(f"{prefix}.q_proj.weight", (q_shape, hidden), q_part)
        else:
            rank = config.q_lora_rank
            q_first = ckpt.matrix(f"{prefix}.q_a_proj.weight", (rank, hidden))
            self.q_a_layernorm = RmsNorm(ckpt, f"{prefix}.q_a_layernorm", rank, self.eps)
            self.q_b_proj = ckpt.matrix(f"{prefix}.q_b_proj.weight", (q_shape, rank), q_part)
        kv_a_proj = ckpt.matrix(f"{prefix}.kv_a_proj_with_mqa.weight", (config.kv_row_dim, hidden))
        self.q_kv_a_proj = stack_rows((q_first, kv_a_proj), ckpt.dtype)  # one GEMM reads h for both
        self.indexer = Indexer(ckpt, config, f"{prefix}.indexer", layer) if config.index_topk else None
        self.reads_plain = not isinstance(self.q_kv_a_proj, Fp8) or self.indexer is not None
        readers = [self.q_b_proj] if self.indexer is None else [self.q_b_proj, self.indexer.wq_b]
        self.q_low_plain = not all(isinstance(matrix, Fp8) for matrix in readers)
        self.kv_a_layernorm = RmsNorm(ckpt, f"{prefix}.kv_a_layernorm", config.kv_lora_rank, self.eps)
        head_dim = config.qk_nope_head_dim + config.v_head_dim
        kv_b = f"{prefix}.kv_b_proj.weight", (total * head_dim, config.kv_lora_rank), Part(rows=heads(head_dim))
        self.kv_b_proj = ckpt.matrix(*kv_b)
        by_head = plain(self.kv_b_proj, ckpt.dtype).unflatten(0, (self.num_heads, head_dim))
        self.w_uk, self.w_uv = by_head.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)  # [H, N or V, C]
        self.w_uk_fp8, self.w_uv_fp8 = _heads_fp8(self.kv_b_proj, config)
        self.o_proj = ckpt.matrix(
            f"{prefix}.o_proj.weight", (hidden, total * config.v_head_dim), Part(cols=heads(config.v_head_dim))
        )

    def __call__(self, h: Operand, step: AttnStep, kv: Tensor) -> Tensor:
        """h [T, D], kv [num_pages, page_size, C+R] of this layer -> [T, D], this rank's part of a sum over TP. Padding
        rows attend to nothing.
        """
        q_norm = None if self.q_a_layernorm is None else self.q_a_layernorm.weight
        q_low, c_kv, k_pe = mla_qkv_norm(
            linear(h, self.q_kv_a_proj),
            q_norm,
            self.kv_a_layernorm.weight,
            self.eps,
            step.cos,
            step.sin,
            step.inputs.kv_slots,
            kv,
            plain=self.q_low_plain,
        )
        chosen = None if self.indexer is None else self.indexer(h, q_low, step)
        q = q_low.plain if self.q_b_proj is None else linear(q_low, self.q_b_proj)
        assert q is not None
        q = q.unflatten(-1, (self.num_heads, self.config.qk_head_dim))
        if step.attend is not None:
            return linear(step.attend(q, c_kv, k_pe), self.o_proj)
        latents = [] if chosen is None else [self._attend_sparse(q[: len(chosen)], step, chosen, kv)]
        latents += self._latents(q, step, kv)
        if step.shared is None and isinstance(self.o_proj, Fp8) and [len(latent) for latent in latents] == [len(q)]:
            return linear(project_v_quant(latents[0], self.w_uv, self.w_uv_fp8), self.o_proj)
        return linear(self._heads(latents, q, c_kv, k_pe, step, kv), self.o_proj)

    def attended(self, q: Tensor, c_kv: Tensor, k_pe: Tensor, step: AttnStep, kv: Tensor) -> Tensor:
        """Attention alone, not sparse: q [T, H, N+R] not rotated yet, c_kv [T, C] and k_pe [T, R] -> [T, H*V]"""
        return self._heads(self._latents(q, step, kv), q, c_kv, k_pe, step, kv)

    def _latents(self, q: Tensor, step: AttnStep, kv: Tensor) -> list[Tensor]:
        """Those of each absorbed group, [rows, H, C]."""
        return [self._attend_absorbed(q[group.rows], step, group, kv) for group in step.absorbed]

    def _heads(
        self, latents: list[Tensor], q: Tensor, c_kv: Tensor, k_pe: Tensor, step: AttnStep, kv: Tensor
    ) -> Tensor:
        """`latents` of the first rows -> [T, H*V] of all"""
        shared, rows = step.shared, step.expanded_rows
        parts = [project_v(latent, self.w_uv) for latent in latents]
        if rows.stop > rows.start:
            parts.append(self._expanded(q[rows], c_kv[rows], k_pe[rows], step, kv))
        if shared is not None:
            parts.append(self._shared(q[shared.rows], torch.cat((c_kv, k_pe), -1)[shared.rows], step, shared, kv))
        missing = q.shape[0] - sum(part.shape[0] for part in parts)
        if missing or not parts:
            parts.append(q.new_zeros(missing, self.num_heads * self.config.v_head_dim))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expanded(self, q: Tensor, c_kv: Tensor, k_pe: Tensor, step: AttnStep, kv: Tensor) -> Tensor:
        """q [T, H, N+R] of prompt chunks, not rotated yet -> [T, H*V]"""
        attn, rows, seqs = step.inputs.attn, step.expanded_rows, step.expanded_seqs
        q, q_lens = rope_q(q, step.cos[rows], step.sin[rows]), attn.q_lens_host[seqs]
        k, v = self._up_project(c_kv, k_pe)
        out, lse = mla_prefill(q, k, v, q_lens, q_lens, self.scale, causal=True, plan=step.own_plan)
        widths = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        for part in step.prefix:
            cached = kv_gather(kv, attn.page_table[seqs], part.starts, part.lens).to(q.dtype)
            k, v = self._up_project(*cached.split(widths, dim=-1))
            seen = mla_prefill(q, k, v, q_lens, part.lens, self.scale, causal=False, plan=part.plan)
            out, lse = merge_state(out, lse, *seen)
        return out.flatten(1)

    def _shared(self, q: Tensor, own: Tensor, step: AttnStep, shared: ContextParallelStep, kv: Tensor) -> Tensor:
        """Rows of a shared chunk, q [P, H, N+R] not rotated yet, own [P, C+R] -> [P, H*V]. Collective over dp."""
        rows, lens, widths = shared.rows, shared.lens, (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        chunk = shared.exchange(own, kv, widths[0])

        def attend(q: Tensor, state: tuple[Tensor, Tensor], parts: tuple[KeyPart, ...]) -> tuple[Tensor, Tensor]:
            for part in parts:
                k, v = self._up_project(*shared.keys(part, chunk, kv).split(widths, dim=-1))
                seen = mla_prefill(q, k, v, q.shape[:1], k.shape[:1], self.scale, causal=False, plan=part.plan)
                state = merge_state(*state, *seen)
            return state

        q = rope_q(q, step.cos[rows], step.sin[rows])
        k, v = self._up_project(*own.split(widths, dim=-1))
        state = mla_prefill(q, k, v, lens, lens, self.scale, causal=True, plan=shared.own_plan)
        out, lse = attend(q, state, shared.for_both)
        high, _ = attend(q[lens[0] :], (out[lens[0] :], lse[lens[0] :]), shared.for_high)
        return torch.cat((out[: lens[0]], high)).flatten(1)

    def _up_project(self, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """c_kv [T, C], k_pe [T, R] -> k [T, H, N+R], v [T, H, V]"""
        up = linear(c_kv, self.kv_b_proj).unflatten(-1, (self.num_heads, -1))
        return expand_kv(up, k_pe, self.config.qk_nope_head_dim)

    def _attend_absorbed(self, q: Tensor, step: AttnStep, group: AbsorbedGroup, kv: Tensor) -> Tensor:
        """q [T, H, N+R] of the group, not rotated yet -> [T, H, C], for w_uv"""
        q = absorb_q(q, self.w_uk, step.cos[group.rows], step.sin[group.rows], self.w_uk_fp8)  # [T, H, C+R]
        latent, _ = mla_decode(
            q.unflatten(0, (-1, group.num_queries)),
            kv,
            group.page_table,
            group.seq_lens,
            self.scale,
            self.config.kv_lora_rank,
            plan=group.plan,
        )
        return latent.flatten(0, 1)

    def _attend_sparse(self, q: Tensor, step: AttnStep, chosen: Tensor, kv: Tensor) -> Tensor:
        """q [T, H, N+R] of the first rows, not rotated yet; chosen int32 [T, K] -> [T, H, C], for w_uv"""
        rows = slice(0, len(chosen))
        q = absorb_q(q, self.w_uk, step.cos[rows], step.sin[rows], self.w_uk_fp8)
        assert step.sparse_lens is not None
        return mla_sparse(q, kv, chosen, step.sparse_lens, self.scale, self.config.kv_lora_rank)


def _heads_fp8(kv_b_proj: Matrix, config: ModelConfig) -> tuple[Fp8 | None, Fp8 | None]:
    """Views of w_uk and w_uv where they are FP8 and each head of each is one row of blocks, as in V3."""
    if not isinstance(kv_b_proj, Fp8) or (config.qk_nope_head_dim, config.v_head_dim) != (BLOCK, BLOCK):
        return None, None
    data, scales = kv_b_proj.data.unflatten(0, (-1, 2, BLOCK)), kv_b_proj.scales.unflatten(0, (-1, 2))
    return Fp8(data[:, 0], scales[:, 0]), Fp8(data[:, 1], scales[:, 1])
