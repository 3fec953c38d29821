"""Widths of models that tests and benches share."""

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
