"""What sparse attention (model/indexer.py) adds to a step: the index keys in the pages, and who chooses among which."""

from dataclasses import dataclass
from typing import Self

from millrace_kernels import indexer
from millrace_kernels.backend import KernelPlan
from millrace_kernels.indexer import IndexRows, cached_rows
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.inputs import ForwardInput


@dataclass(frozen=True, slots=True)
class IndexPool:
    """The index keys of all layers, behind the latent rows of all layers in each page. They are float32 in a float32
    pool, E4M3 in every other.
    """

    pages: Tensor  # uint8 [num_pages, page_bytes]
    page_rows: int  # a page's length in latent rows
    first: int  # byte of a page
    layer_bytes: int
    page_size: int
    width: int
    exact: bool

    @classmethod
    def of(cls, kv: Tensor, config: ModelConfig) -> Self | None:
        """kv: [num_pages, L, page_size, C+R], a view of the pool. None: attention is dense."""
        if not config.index_topk:
            return None
        _, layers, page_size, width = kv.shape
        row = config.index_row_bytes(str(kv.dtype).removeprefix("torch."))
        first = layers * page_size * width * kv.itemsize
        assert kv.stride(0) * kv.itemsize >= first + layers * page_size * row, "the pages have no room for index keys"
        pages = indexer.page_bytes(kv)
        exact, page_rows = kv.itemsize == 4, kv.stride(0) // width
        return cls(pages, page_rows, first, page_size * row, page_size, config.index_head_dim, exact)

    def layer(self, index: int) -> IndexRows:
        return cached_rows(self.pages, self.first + index * self.layer_bytes, self.page_size, self.width, self.exact)


@dataclass(frozen=True, slots=True)
class SparseGroup:
    """Rows of a step that choose their keys: the decode sequences, or a prompt chunk."""

    rows: slice
    page_table: Tensor  # int32 [rows, P], or [1, P] of a chunk
    lens: Tensor  # int32 [rows], keys of each row
    plan: KernelPlan  # of indexer.index_logits


def sparse_groups(inputs: ForwardInput, topk: int, page_size: int) -> tuple[SparseGroup, ...]:
    """The first sequences of a step: none; those that decode; or all. The others are short, so that all of their keys
    would be chosen, and attend as in a dense model. A graph's decode sequences are judged by their longest page table.
    """
    attn, decode = inputs.attn, inputs.attn.num_decode
    if attn.page_table.shape[1] * page_size <= topk:
        return ()
    groups, row = [], 0
    if decode:
        queries = attn.q_lens_host[0]
        row = decode * queries
        groups.append(_group(inputs, slice(0, row), attn.page_table[:decode].repeat_interleave(queries, 0), page_size))
    if max(attn.seq_lens_host[decode:], default=0) <= topk:
        return tuple(groups)
    for index in range(decode, attn.num_seqs):
        rows, pages = slice(row, row + attn.q_lens_host[index]), -(-attn.seq_lens_host[index] // page_size)
        groups.append(_group(inputs, rows, attn.page_table[index : index + 1, :pages], page_size))
        row = rows.stop
    return tuple(groups)


def _group(inputs: ForwardInput, rows: slice, page_table: Tensor, page_size: int) -> SparseGroup:
    lens = (inputs.positions[rows] + 1).clamp(max=page_table.shape[1] * page_size).int()
    return SparseGroup(rows, page_table, lens, indexer.plan(lens, page_table.shape[0] == lens.shape[0]))
