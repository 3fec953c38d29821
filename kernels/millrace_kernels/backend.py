"""The choice of an implementation for each op.

An op is named `module.function`. `TABLE` lists its faster implementations, best first, each with the capability, the
sizes (tokens, mostly) and the library that it needs; they were measured with `millrace bench kernels`. Without a
matching row the op's reference runs, which is the body of the op's function: every op works on every device, even
without any library.

Two choices are made elsewhere. Up to SMALL_TOKENS tokens an FP8 product reads plain rows, not quantised ones: `linear`,
`mla_absorb`, norms and SwiGLU follow this one constant. A file of lib/ hands dtypes, widths and alignments that its
library refuses to our kernel of the op.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

SMALL_TOKENS = 16  # up to so many tokens the read of the weight dominates, and quantising activations does not pay


@dataclass(frozen=True, slots=True)
class Choice:
    target: str  # `import.path:function`, with the signature of the op; empty: the reference
    needs: str = ""  # a library that must be installed
    min_size: int = 0
    max_size: int = 1 << 62
    when: str = ""  # `import.path:function` of (size, shape), where sizes alone do not decide
    capability: str = "sm90"

    def serves(self, size: int, shape: tuple[int, ...]) -> bool:
        return self.min_size <= size <= self.max_size and (not self.when or _load(self.when)(size, shape))


REFERENCE = Choice("")


def _ours(target: str, max_size: int = 1 << 62, when: str = "") -> tuple[Choice]:
    """The row of one of our Triton kernels."""
    return (Choice(f"millrace_kernels.triton.{target}", needs="triton", max_size=max_size, when=when),)


TABLE: dict[str, tuple[Choice, ...]] = {
    # dense
    "fp8.quant_groups": _ours("quant:quant_groups"),
    "fp8.fp8_linear": (
        *_ours("fp8_linear:fp8_linear", max_size=256, when="millrace_kernels.triton.fp8_linear:is_measured"),
        Choice("millrace_kernels.lib.deep_gemm:fp8_linear", needs="deep_gemm"),
        *_ours("fp8_linear:fp8_linear"),
    ),
    "fp8.compile_ahead": (Choice("millrace_kernels.lib.deep_gemm:compile_ahead", needs="deep_gemm"),),
    "fp8.small_linear": _ours("small_linear:small_linear"),
    "int8.quant_rows": _ours("int8:quant_rows"),
    "int8.int8_linear": (
        *_ours("int8:int8_linear"),
        Choice("millrace_kernels.lib.cublas:int8_linear", min_size=17),
    ),
    "rms_norm.rms_norm": _ours("rms_norm:rms_norm"),
    "rms_norm.add_rms_norm": _ours("rms_norm:add_rms_norm"),
    "rms_norm.rms_norm_quant": _ours("rms_norm:rms_norm_quant"),
    "rms_norm.add_rms_norm_quant": _ours("rms_norm:add_rms_norm_quant"),
    "silu_mul.silu_mul": _ours("quant:silu_mul"),
    "silu_mul.silu_mul_quant": _ours("quant:silu_mul_quant"),
    # experts
    "moe_gate.gate_logits": (
        *_ours("moe_gate:gate_logits", max_size=256),
        Choice("millrace_kernels.lib.cublas:gate_logits"),
    ),
    "moe_gate.moe_gate": _ours("moe_gate:moe_gate"),
    "moe_experts.moe_experts": (
        *_ours("moe_small:moe_experts", max_size=SMALL_TOKENS),
        *_ours("moe_grouped:moe_experts"),
    ),
    "moe_experts.moe_experts_fp8": (
        *_ours("moe_grouped:moe_experts_fp8", when="millrace_kernels.triton.moe_grouped:is_fastest"),
        *_ours("moe_small:moe_experts_fp8", max_size=SMALL_TOKENS),
        Choice("millrace_kernels.lib.deep_gemm_grouped:moe_experts_fp8", needs="deep_gemm"),
        *_ours("moe_grouped:moe_experts_fp8"),
    ),
    "moe_experts.moe_experts_other": (Choice("millrace_kernels.lib.cublas:moe_experts_other"),),
    # sampling
    "sample_tokens.sample_tokens": _ours("sample_tokens:sample_tokens"),
    # attention
    "mla_qkv.mla_qkv_norm": _ours("mla_qkv:mla_qkv_norm"),
    "mla_absorb.absorb_q": (
        *_ours("mla_absorb:absorb_q_small", max_size=SMALL_TOKENS),
        *_ours("mla_absorb:absorb_q_many", when="millrace_kernels.triton.mla_absorb:absorb_is_measured"),
        *_ours("mla_absorb:absorb_q"),
    ),
    "mla_absorb.project_v": (*_ours("mla_absorb:project_v_small", max_size=SMALL_TOKENS), REFERENCE),
    "mla_absorb.project_v_quant": (
        *_ours("mla_absorb:project_v_quant", when="millrace_kernels.triton.mla_absorb:project_quant_is_measured"),
        REFERENCE,
    ),
    "mla_expand.expand_kv": _ours("mla_expand:expand_kv"),
    "mla_expand.rope_q": _ours("mla_expand:rope_q"),
    "merge_state.merge_state": _ours("merge_state:merge_state"),
    "kv_gather.kv_gather": _ours("kv_gather:kv_gather"),
    "mla_decode.plan": (Choice("millrace_kernels.lib.flash_mla:schedule", needs="flash_mla"),),
    "mla_decode.mla_decode": (
        Choice("millrace_kernels.lib.flash_mla:mla_decode", needs="flash_mla"),
        *_ours("mla_decode:mla_decode"),
    ),
    "mla_prefill.plan": (Choice("millrace_kernels.lib.flashinfer:schedule", needs="flashinfer"),),
    "mla_prefill.mla_prefill": (
        Choice("millrace_kernels.lib.flashinfer:mla_prefill", needs="flashinfer"),
        *_ours("mla_prefill:mla_prefill"),
    ),
}

_forced: dict[str, str] = {}


@functools.cache
def capability(device: torch.device) -> str:
    """`cpu`, or `sm90` for a CUDA device of compute capability 9.0."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def implementation(
    op: str, device: torch.device, size: int = 0, shape: tuple[int, ...] = ()
) -> Callable[..., Any] | None:
    """The function that runs `op` on tensors of `device`, with the signature of the op; None: its reference does.
    `shape` is the weight's.
    """
    if device.type == "cpu" and not _forced:
        return None
    target = _forced.get(op)
    if target is None:
        target = next((choice.target for choice in choices(op, device) if choice.serves(size, shape)), "")
    return _load(target) if target else None


def choices(op: str, device: torch.device) -> tuple[Choice, ...]:
    """The rows of `op` that can run on `device`, best first: right capability, library there."""
    return _available(op, capability(device))


@contextlib.contextmanager
def forced(**targets: str) -> Iterator[None]:
    """Runs ops with a given implementation, for comparisons: `forced(**{"kv_gather.kv_gather": "path:function"})`. An
    empty target is the reference.
    """
    before = dict(_forced)
    _forced.update(targets)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@functools.cache
def _load(target: str) -> Callable[..., Any]:
    path, name = target.split(":")
    return getattr(importlib.import_module(path), name)


@functools.cache
def _available(op: str, capability: str) -> tuple[Choice, ...]:
    return tuple(choice for choice in TABLE.get(op, ()) if choice.capability == capability and _has(choice.needs))


@functools.cache
def _has(library: str) -> bool:
    """Whether the library imports; logs once when it does not."""
    if not library:
        return True
    try:
        importlib.import_module(library)
    except Exception as error:  # a library may fail in any way, above all when it meets another CUDA
        log.warning("%s cannot be used, the next best runs: %s: %s", library, type(error).__name__, error)
        return False
    return True
