"""Inputs of attention's ops as keyword arguments, for tests and benches; memory that must not be read is NaN.

Widths are DeepSeek-V3's unless named; letters as in the model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, E4M3_MAX, Fp8
from millrace_kernels.testing.tolerances import poisoned

LATENT, ROPE, NOPE, VALUE, PAGE, LAYERS = 512, 64, 128, 128, 64, 3
ROW, QK = LATENT + ROPE, NOPE + ROPE
SCALE = 0.07
E4M3_NAN = 0x7F  # as a byte: many operations of torch do not support E4M3

Inputs = dict[str, Any]  # the arguments of a kernel, by name


class Draw:
    """Normal numbers on a device, the same ones for the same calls."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(dtype or self.dtype)

    def part(self, *shape: int) -> Tensor:
        """The first columns of rows twice as wide, the others NaN."""
        wide = poisoned((*shape[:-1], 2 * shape[-1]), self.dtype).to(self.device)
        wide[..., : shape[-1]] = self(*shape)
        return wide[..., : shape[-1]]

    def angles(self, num: int) -> Inputs:
        angles = self(num, ROPE // 2, dtype=torch.float32)
        return {"cos": angles.cos(), "sin": angles.sin()}

    def permutation(self, num: int) -> Tensor:
        return torch.randperm(num, generator=self.generator, device=self.device)


def mla_qkv_norm(draw: Draw, num: int, q_width: int, normed: bool, kv_dtype: torch.dtype) -> Inputs:
    """The pool holds one page more than the tokens need, and is NaN."""
    pages = num // PAGE + 2
    pool = poisoned((pages, LAYERS, PAGE, ROW), kv_dtype).to(draw.device)
    return {
        "qkv": draw.part(num, q_width + ROW),
        "q_weight": draw(q_width) if normed else None,
        "kv_weight": 100 * draw(LATENT),  # so that E4M3 has something to saturate
        "eps": 1e-6,
        **draw.angles(num),
        "slots": draw.permutation((pages - 1) * PAGE)[:num] + PAGE,
        "kv": pool[:, 1],
    }


def absorb_q(draw: Draw, num: int, heads: int) -> Inputs:
    return {"q": draw(num, heads, QK), "w_uk": draw(heads, NOPE + VALUE, LATENT)[:, :NOPE], **draw.angles(num)}


def project_v(draw: Draw, num: int, heads: int) -> Inputs:
    return {"latent": draw(num, heads, LATENT), "w_uv": draw(heads, NOPE + VALUE, LATENT)[:, NOPE:]}


def fp8_heads(weight: Tensor) -> Fp8:
    """weight [H, N <= 128, C] of the absorbed form -> E4M3, with a scale per head and 128 columns: [H, C/128]"""
    groups = weight.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax((1, 3)) / E4M3_MAX
    return Fp8((groups / scales[:, None, :, None]).flatten(2).to(torch.float8_e4m3fn), scales)


def expand_kv(draw: Draw, num: int, heads: int) -> Inputs:
    return {"up": draw(num, heads, NOPE + VALUE), "k_pe": draw.part(num, ROPE), "nope": NOPE}


def rope_q(draw: Draw, num: int, heads: int) -> Inputs:
    return {"q": draw(num, heads, QK), **draw.angles(num)}


def merge_state(draw: Draw, num: int, heads: int) -> Inputs:
    """Of four neighbouring tokens one lacks side a, one side b, one both."""
    sides: Inputs = {}
    for name, missing in (("a", (1, 3)), ("b", (2, 3))):
        out, lse = draw(num, heads, VALUE), 5 * draw(num, heads, dtype=torch.float32)
        for first in missing:
            out[first::4], lse[first::4] = 0.0, -torch.inf
        sides |= {f"out_{name}": out, f"lse_{name}": lse}
    return sides


def kv_gather(draw: Draw, starts: Sequence[int], lens: Sequence[int], kv_dtype: torch.dtype) -> Inputs:
    kv, page_table = paged(draw, [start + num for start, num in zip(starts, lens, strict=True)], kv_dtype)
    return {"kv": kv, "page_table": page_table, "starts": starts, "lens": lens}


def mla_decode(draw: Draw, seq_lens: Sequence[int], queries: int, heads: int, kv_dtype: torch.dtype) -> Inputs:
    kv, page_table = paged(draw, seq_lens, kv_dtype)
    return {
        "q": draw(len(seq_lens), queries, heads, ROW),
        "kv": kv,
        "page_table": page_table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=draw.device),
        "scale": SCALE,
        "kv_lora_rank": LATENT,
    }


def mla_prefill(
    draw: Draw, q_lens: Sequence[int], k_lens: Sequence[int], heads: int, causal: bool, padding: int = 2
) -> Inputs:
    def rows(lens: Sequence[int], *shape: int) -> Tensor:
        padded = poisoned((sum(lens) + padding, heads, *shape), draw.dtype).to(draw.device)
        padded[: sum(lens)] = draw(sum(lens), heads, *shape)
        return padded

    return {
        "q": rows(q_lens, QK),
        "k": rows(k_lens, QK),
        "v": rows(k_lens, NOPE + VALUE)[..., NOPE:],  # a view of the projection
        "q_lens": q_lens,
        "k_lens": k_lens,
        "scale": SCALE,
        "causal": causal,
    }


def paged(draw: Draw, seq_lens: Sequence[int], dtype: torch.dtype, contiguous: bool = False) -> tuple[Tensor, Tensor]:
    """kv [num_pages, page, W], layer 1 of a page-major pool (or a pool of its own) whose pages are shuffled and whose
    unused rows are NaN; page_table int32 [B, P], padded with the null page 0.
    """
    counts = [-(-num // PAGE) for num in seq_lens]
    width, used = max(counts, default=0), sum(counts)
    pool = torch.empty(used + 1, 1 if contiguous else LAYERS, PAGE, ROW, device=draw.device, dtype=dtype)
    kv = pool[:, 0 if contiguous else 1]
    raw, nan = (kv, torch.nan) if dtype != torch.float8_e4m3fn else (kv.view(torch.uint8), E4M3_NAN)
    pool.view(raw.dtype).fill_(nan)
    ids = (draw.permutation(used) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(width, 1), dtype=torch.int32)
    for row, (count, num) in enumerate(zip(counts, seq_lens, strict=True)):
        pages, ids = ids[:count], ids[count:]
        table[row, :count] = torch.tensor(pages, dtype=torch.int32)
        raw[pages] = draw(count, PAGE, ROW, dtype=dtype).view(raw.dtype)
        if num % PAGE:
            raw[pages[-1], num % PAGE :] = nan
    return kv, table.to(draw.device)
