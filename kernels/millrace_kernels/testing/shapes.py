"""Widths of models that tests and benches share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dims:
    """One model's widths. Letters as in the model: D hidden, H heads, C latent, R rope, N nope, V value, E experts."""

    name: str
    hidden: int
    heads: int
    experts: int
    groups: int
    topk_groups: int
    top_k: int
    moe_intermediate: int
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    page: int = 64

    @property
    def kv_row(self) -> int:
        return self.latent + self.rope


TINY = Dims("tiny", 256, heads=4, experts=16, groups=4, topk_groups=2, top_k=4, moe_intermediate=128)
V3_TP8 = Dims("v3-tp8", 7168, heads=16, experts=256, groups=8, topk_groups=4, top_k=8, moe_intermediate=256)


def strided_rows(num: int, width: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal [num, width], the first columns of rows twice as wide; the others are NaN."""
    wide = poisoned((num, 2 * width), dtype, device)
    wide[:, :width] = torch.randn(num, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide[:, :width]


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Ragged sequences: lengths of the new tokens and of what is cached before them."""

    name: str
    q_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(q + p for q, p in zip(self.q_lens, self.prefix_lens, strict=True))


PREFILL_CASES = (
    PrefillCase("empty", (), ()),
    PrefillCase("one-token", (1,), (0,)),
    PrefillCase("ragged", (7, 64, 1, 128), (0, 0, 0, 0)),
    PrefillCase("across-blocks", (129, 300), (0, 0)),
    PrefillCase("prefix", (5, 64, 33), (64, 0, 130)),
)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    name: str
    num_queries: int
    seq_lens: tuple[int, ...]


DECODE_CASES = (
    DecodeCase("empty", 1, ()),
    DecodeCase("one", 1, (1,)),
    DecodeCase("page-edges", 1, (63, 64, 65, 128, 129)),
    DecodeCase("padding-sequence", 1, (10, 0, 200)),
    DecodeCase("verify", 4, (4, 66, 130)),
    DecodeCase("padded-queries", 7, (3, 90)),
    DecodeCase("long-and-short", 1, (3000, 5, 700)),
)


def paged_pool(
    dims: Dims, seq_lens: tuple[int, ...], generator: torch.Generator, layers: int = 3
) -> tuple[Tensor, Tensor]:
    """A page-major pool and its page table, shuffled ids; only the sequences' own rows of layer 1 are not NaN.

    Returns:
        kv [num_pages, page, W], the strided view of layer 1; page_table int32 [B, P] padded with the null page.
    """
    counts = [-(-n // dims.page) for n in seq_lens]
    pool = poisoned((sum(counts) + 3, layers, dims.page, dims.kv_row))
    ids = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(counts, default=1), dtype=torch.int32)
    for row, (count, num) in enumerate(zip(counts, seq_lens, strict=True)):
        pages, ids = ids[:count], ids[count:]
        table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        values = torch.randn(num, dims.kv_row, generator=generator)
        for index, page in enumerate(pages):
            part = values[index * dims.page : (index + 1) * dims.page]
            pool[page, 1, : len(part)] = part
    return pool[:, 1], table
