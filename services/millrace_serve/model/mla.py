"""Multi-head latent attention (DeepSeek-V2 paper, section 2.1; V3 paper, eq. 1-11) in three forms of the same maths.

    c_q = norm(W_DQ h)      [q_nope | q_pe] = W_UQ c_q       c_kv = norm(W_DKV h)      k_pe = rope(W_KR h)
    k_nope = W_UK c_kv      v = W_UV c_kv                    o = softmax(scale (q_nope k_nope + q_pe k_pe)) v

Only [c_kv | k_pe] is cached.
    EXPANDED         k and v of the step's own tokens are computed per head; nothing is cached yet
    EXPANDED_PREFIX  so is the cached prefix, chunk by chunk; the partial results are merged by their log-sum-exp
    ABSORBED         W_UK moves to the query and W_UV to the output, so all heads attend to the cached rows themselves

Letters: T tokens, B sequences, H heads of this rank, C kv_lora_rank, R rope dim, N nope dim, V v head dim.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from millrace_kernels.kv_gather import kv_gather
from millrace_kernels.kv_store import kv_store
from millrace_kernels.linear import linear
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_decode import mla_decode
from millrace_kernels.mla_prefill import mla_prefill
from millrace_kernels.rope import rope
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Checkpoint
from millrace_serve.model.yarn import softmax_scale


class Form(enum.Enum):
    EXPANDED = "expanded"
    EXPANDED_PREFIX = "expanded_prefix"
    ABSORBED = "absorbed"


@dataclass(frozen=True, slots=True)
class FormThresholds:
    absorb_max_queries: int = 48  # queries per key up to which cached prefixes are absorbed; break-even on a CPU
    prefix_chunk_tokens: int = 4096  # prefix tokens, over all sequences, whose k and v exist at a time


def choose_form(q_lens: Sequence[int], seq_lens: Sequence[int], thresholds: FormThresholds) -> Form:
    """The form of a step's prompt chunks.

    Expanding costs per key, absorbing costs per (query, key) pair; so what counts is the number of queries that a key
    serves: the mean of q_len weighted by seq_len.
    """
    if all(q == seq for q, seq in zip(q_lens, seq_lens, strict=True)):
        return Form.EXPANDED
    pairs = sum(q * seq for q, seq in zip(q_lens, seq_lens, strict=True))
    return Form.ABSORBED if pairs <= thresholds.absorb_max_queries * sum(seq_lens) else Form.EXPANDED_PREFIX


def prefix_chunks(prefix_lens: Sequence[int], max_tokens: int, page_size: int) -> list[tuple[list[int], list[int]]]:
    """(starts, lens) per sequence of each chunk; starts are page-aligned, a chunk has up to `max_tokens` rows."""
    sharing = sum(1 for n in prefix_lens if n)
    step = max(max_tokens // max(sharing, 1) // page_size, 1) * page_size
    return [
        ([min(start, n) for n in prefix_lens], [min(max(n - start, 0), step) for n in prefix_lens])
        for start in range(0, max(prefix_lens, default=0), step)
    ]


@dataclass(frozen=True, slots=True)
class AttnStep:
    """What all layers of one step share."""

    inputs: ForwardInput
    cos: Tensor  # float32 [T, R/2]
    sin: Tensor
    form: Form  # of the prompt chunks; decode sequences are always absorbed
    thresholds: FormThresholds

    @classmethod
    def prepare(cls, inputs: ForwardInput, tables: tuple[Tensor, Tensor], thresholds: FormThresholds) -> AttnStep:
        plan = inputs.attn
        form = choose_form(plan.q_lens_host[plan.num_decode :], plan.seq_lens_host[plan.num_decode :], thresholds)
        return cls(inputs, tables[0][inputs.positions], tables[1][inputs.positions], form, thresholds)


class Mla:
    def __init__(self, ckpt: Checkpoint, config: ModelConfig, dims: ParallelDims, prefix: str) -> None:
        self.config, self.dims = config, dims
        self.scale = softmax_scale(config)
        self.num_heads = check_divides("num_attention_heads", config.num_attention_heads, "tp", dims.tp)
        eps, hidden = config.rms_norm_eps, config.hidden_size
        total = config.num_attention_heads

        def heads(dim: int) -> tuple[int, int]:
            return dims.tp_rank * self.num_heads * dim, (dims.tp_rank + 1) * self.num_heads * dim

        q_shape, q_rows = total * config.qk_head_dim, heads(config.qk_head_dim)
        kv_a_proj = ckpt.tensor(f"{prefix}.kv_a_proj_with_mqa.weight", (config.kv_row_dim, hidden))
        if config.q_lora_rank is None:
            q_first = ckpt.tensor(f"{prefix}.q_proj.weight", (q_shape, hidden), rows=q_rows)
            self.q_a_layernorm = None
        else:
            rank = config.q_lora_rank
            q_first = ckpt.tensor(f"{prefix}.q_a_proj.weight", (rank, hidden))
            self.q_a_layernorm = RmsNorm(ckpt, f"{prefix}.q_a_layernorm", rank, eps)
            self.q_b_proj = ckpt.tensor(f"{prefix}.q_b_proj.weight", (q_shape, rank), rows=q_rows)
        self.q_kv_a_proj = torch.cat((q_first, kv_a_proj))  # one GEMM reads h for both
        self.kv_a_layernorm = RmsNorm(ckpt, f"{prefix}.kv_a_layernorm", config.kv_lora_rank, eps)
        head_dim = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = ckpt.tensor(
            f"{prefix}.kv_b_proj.weight", (total * head_dim, config.kv_lora_rank), rows=heads(head_dim)
        )
        per_head = self.kv_b_proj.unflatten(0, (self.num_heads, head_dim))
        # [H, N, C], [H, V, C]
        self.w_uk, self.w_uv = per_head.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        self.o_proj = ckpt.tensor(
            f"{prefix}.o_proj.weight", (hidden, total * config.v_head_dim), cols=heads(config.v_head_dim)
        )

    def __call__(self, x: Tensor, step: AttnStep, kv: Tensor) -> Tensor:
        """x [T, D], kv [num_pages, page_size, C+R] of this layer -> [T, D]. Padding rows attend to nothing."""
        plan = step.inputs.attn
        q_nope, q_pe, c_kv, k_pe = self._project(x, step)
        kv_store(kv, step.inputs.kv_slots, c_kv, k_pe)

        heads = x.new_zeros(x.shape[0], self.num_heads, self.config.v_head_dim)
        decode, end = plan.num_decode, sum(plan.q_lens_host)
        if decode:
            heads[:decode] = self._absorbed(q_nope[:decode], q_pe[:decode], step, slice(0, decode), kv)
        if end > decode:
            rows, seqs = slice(decode, end), slice(decode, plan.num_seqs)
            if step.form is Form.ABSORBED:
                heads[rows] = self._absorbed(q_nope[rows], q_pe[rows], step, seqs, kv)
            else:
                q = torch.cat((q_nope[rows], q_pe[rows]), dim=-1)
                heads[rows] = self._expanded(q, c_kv[rows], k_pe[rows], step, seqs, kv)
        return self.dims.tp_all_reduce(linear(heads.flatten(1), self.o_proj))

    def _project(self, x: Tensor, step: AttnStep) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_nope [T, H, N], q_pe [T, H, R], c_kv [T, C], k_pe [T, R]"""
        config = self.config
        widths = (self.q_kv_a_proj.shape[0] - config.kv_row_dim, config.kv_lora_rank, config.qk_rope_head_dim)
        q, c_kv, k_pe = linear(x, self.q_kv_a_proj).split(widths, dim=-1)
        if self.q_a_layernorm is not None:
            q = linear(self.q_a_layernorm(q), self.q_b_proj)
        q = q.unflatten(-1, (self.num_heads, config.qk_head_dim))
        q_nope, q_pe = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        return q_nope, rope(q_pe, step.cos, step.sin), self.kv_a_layernorm(c_kv), rope(k_pe, step.cos, step.sin)

    def _expanded(self, q: Tensor, c_kv: Tensor, k_pe: Tensor, step: AttnStep, seqs: slice, kv: Tensor) -> Tensor:
        """q [T, H, N+R] of prompt chunks -> [T, H, V]"""
        plan = step.inputs.attn
        q_lens, seq_lens = plan.q_lens_host[seqs], plan.seq_lens_host[seqs]
        out, lse = mla_prefill(q, *self._up_project(c_kv, k_pe), q_lens, q_lens, self.scale, causal=True)
        prefix = [seq - own for seq, own in zip(seq_lens, q_lens, strict=True)]
        for starts, lens in prefix_chunks(prefix, step.thresholds.prefix_chunk_tokens, kv.shape[1]):
            rows = kv_gather(kv, plan.page_table[seqs], starts, lens).to(q.dtype)
            k, v = self._up_project(*rows.split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=-1))
            out, lse = merge_state(out, lse, *mla_prefill(q, k, v, q_lens, lens, self.scale, causal=False))
        return out

    def _up_project(self, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """c_kv [T, C], k_pe [T, R] -> k [T, H, N+R], v [T, H, V]"""
        config = self.config
        up = linear(c_kv, self.kv_b_proj).unflatten(-1, (self.num_heads, -1))
        k_nope, v = up.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), v

    def _absorbed(self, q_nope: Tensor, q_pe: Tensor, step: AttnStep, seqs: slice, kv: Tensor) -> Tensor:
        """q_nope [T, H, N], q_pe [T, H, R] -> [T, H, V]"""
        plan = step.inputs.attn
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)  # [T, H, C]
        q = torch.cat((q_latent, q_pe), dim=-1)
        q_lens = plan.q_lens_host[seqs]
        groups = [seqs] if len(set(q_lens)) == 1 else [slice(i, i + 1) for i in range(seqs.start, seqs.stop)]
        out, row = [], 0
        for group in groups:  # mla_decode takes equally many queries per sequence
            shape = (group.stop - group.start, plan.q_lens_host[group.start])
            own = q[row : row + shape[0] * shape[1]].unflatten(0, shape)  # [B, S, H, C+R]
            latent, _ = mla_decode(
                own, kv, plan.page_table[group], plan.seq_lens[group], self.scale, self.config.kv_lora_rank
            )
            out.append(latent.flatten(0, 1))
            row += shape[0] * shape[1]
        return torch.bmm(torch.cat(out).transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)
