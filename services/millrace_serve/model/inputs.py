"""The tensors of one forward step: the whole input of the model from the engine.

Letters: T tokens of the step (padding included), B sequences, S sampled rows, P pages of the longest sequence.
The engine lays the step out as `[decode sequences | prefill sequences]`: the first `num_decode` sequences have equally
many query tokens, the last token and drafts, and attend through the absorbed form; the rest are prompt chunks and may
attend through the expanded form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_serve.model.context_parallel.split import Split
from millrace_serve.model.parallel import ParallelDims


@dataclass(frozen=True, slots=True)
class ContextParallelRows:
    """A prompt chunk that all replicas compute together. The rows that this one computes are the last of the step."""

    split: Split
    dims: ParallelDims
    next_tokens: Tensor  # int64, those behind this replica's rows, for the MTP layer
    kv_slots: Tensor  # int64 [tokens of the chunk] on the owner, empty elsewhere
    page_table: Tensor  # int32 [1, P] on the owner, [0, P] elsewhere


@dataclass(frozen=True, slots=True)
class AttnPlan:
    """The keys of each query of a step: built once per step, read by every layer, overwritten by graph replay.

    `seq_lens` come twice, on the device for kernels and on the host for control flow, so that no layer waits for a
    device read.
    """

    num_decode: int  # leading sequences that decode
    seq_lens: Tensor  # int32 [B], keys of each sequence, this step's tokens included
    page_table: Tensor  # int32 [B, P], physical page ids; entries past a sequence's last page are 0 (the null page)
    q_lens_host: tuple[int, ...]  # [B] query tokens per sequence
    seq_lens_host: tuple[int, ...]  # [B]

    @property
    def num_seqs(self) -> int:
        return len(self.q_lens_host)


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step. Rows past `num_tokens` are padding: their KV goes to page 0 and no row of them is sampled."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], 0-based position in the sequence
    kv_slots: Tensor  # int64 [T], page_id * page_size + offset where this token's KV row is written
    attn: AttnPlan
    sample_rows: Tensor  # int64 [S], rows of T whose logits are wanted
    dp_num_tokens: tuple[int, ...] = ()  # T of every data-parallel replica in rank order; empty when dp == 1
    shared: ContextParallelRows | None = None
    num_tokens: Tensor | None = None  # int32 [1], for a graph is captured once for many steps; None: T, no padding

    @property
    def device(self) -> torch.device:
        return self.token_ids.device
