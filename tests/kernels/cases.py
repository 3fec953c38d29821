"""Lengths that kernels are tested with: at and around tiles and pages."""

from dataclasses import dataclass

TOKENS = (0, 1, 7, 64, 128)


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
