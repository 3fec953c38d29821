"""Shapes that tests and benches share: the head sizes of DeepSeek-V3, token counts at and around tiles."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = (0, 1, 7, 64, 128)


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
