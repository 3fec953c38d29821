"""The choice of an implementation for each op.

An op is named `module.function`. `TABLE` lists its faster implementations, best first, each with the capability, the
sizes (tokens, mostly) and the library that it needs. Their order was measured on sm90 with `millrace bench kernels`.
Our Triton kernels run on every GPU from sm80 on, those that read or write E4M3 from sm89 on. Without a matching row the
op's reference runs, which is the body of the op's function: every op works on every device, even without any library.

A process may prefer libraries for its attention (`prefer`).

Two choices are made elsewhere. Up to SMALL_TOKENS tokens an FP8 product reads plain rows, not quantised ones: `linear`,
`mla_absorb`, norms and SwiGLU follow this one constant. A file of lib/ hands dtypes, widths and alignments that its
library refuses to our kernel of the op.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Kernel = Callable[..., Any]  # with the signature of its op
KernelPlan = Any  # how a kernel spreads a step over the GPU: of its own type, None where it needs none

log = logging.getLogger(__name__)

SMALL_TOKENS = 16  # up to so many tokens the read of the weight dominates, and quantising activations does not pay


@dataclass(frozen=True, slots=True)
class KernelChoice:
    target: str  # `import.path:function`, with the signature of the op; empty: the reference
    needs: str = ""  # a library that must be installed
    min_size: int = 0
    max_size: int = 1 << 62
    when: str = ""  # `import.path:function` of (size, shape), where sizes alone do not decide
    capability: str = "sm90"  # one of these; "sm80+": this one and newer ones

    def runs_on(self, capability: str) -> bool:
        if self.capability.endswith("+") and capability.startswith("sm"):
            return int(capability[2:]) >= int(self.capability[2:-1])
        return capability in self.capability.split()

    def serves(self, size: int, shape: tuple[int, ...]) -> bool:
        return self.min_size <= size <= self.max_size and (not self.when or _load(self.when)(size, shape))


PLAIN, E4M3 = "sm80+", "sm89+"  # GPUs on which Triton compiles kernels without and with E4M3
REFERENCE = KernelChoice("", capability=PLAIN)


def _ours(target: str, max_size: int = 1 << 62, when: str = "", on: str = PLAIN) -> tuple[KernelChoice]:
    """The row of one of our Triton kernels."""
    return (KernelChoice(f"millrace_kernels.triton.{target}", "triton", max_size=max_size, when=when, capability=on),)


TABLE: dict[str, tuple[KernelChoice, ...]] = {
    # dense
    "fp8.quant_groups": _ours("quant:quant_groups", on=E4M3),
    "fp8.fp8_linear": (
        *_ours("fp8_linear:fp8_linear", 256, "millrace_kernels.triton.fp8_linear:is_measured", E4M3),
        KernelChoice("millrace_kernels.lib.deep_gemm:fp8_linear", needs="deep_gemm"),
        *_ours("fp8_linear:fp8_linear", on=E4M3),
    ),
    "fp8.compile_ahead": (KernelChoice("millrace_kernels.lib.deep_gemm:compile_ahead", needs="deep_gemm"),),
    "fp8.small_linear": _ours("small_linear:small_linear", on=E4M3),
    "int8.quant_rows": _ours("int8:quant_rows"),
    "int8.int8_linear": _ours("int8:int8_linear"),
    "rms_norm.rms_norm": _ours("rms_norm:rms_norm"),
    "silu_mul.silu_mul": _ours("quant:silu_mul"),
    # experts
    "moe_gate.gate_logits": (
        *_ours("moe_gate:gate_logits", max_size=256),
        KernelChoice("millrace_kernels.lib.cublas:gate_logits", capability=PLAIN),
    ),
    "moe_gate.moe_gate": _ours("moe_gate:moe_gate"),
    "expert_slots.expert_slots": _ours("expert_slots:expert_slots"),
    "moe_experts.moe_experts": (
        *_ours("moe_small:moe_experts", max_size=SMALL_TOKENS),
        *_ours("moe_grouped:moe_experts"),
    ),
    "moe_experts.moe_experts_fp8": (
        *_ours("moe_grouped:moe_experts_fp8", when="millrace_kernels.triton.moe_grouped:is_fastest", on=E4M3),
        *_ours("moe_small:moe_experts_fp8", max_size=SMALL_TOKENS, on=E4M3),
        KernelChoice("millrace_kernels.lib.deep_gemm_grouped:moe_experts_fp8", needs="deep_gemm"),
        *_ours("moe_grouped:moe_experts_fp8", on=E4M3),
    ),
    "moe_experts.moe_experts_int8": _ours("int8:moe_experts_int8"),
    "moe_experts.moe_experts_other": (KernelChoice("millrace_kernels.lib.cublas:moe_experts_other", capability=PLAIN),),
    "moe_masked.moe_masked": (KernelChoice("millrace_kernels.lib.deep_gemm_grouped:moe_masked", needs="deep_gemm"),),
    # decode rows, sampling, acceptance
    "decode_rows.decode_rows": _ours("decode_rows:decode_rows"),
    "embed_part.embed_part": _ours("embed_part:embed_part"),
    "sample_tokens.sample_tokens": _ours("sample_tokens:sample_tokens"),
    "accept_drafts.accept_drafts": _ours("accept_drafts:accept_drafts"),
    # attention
    "mla_qkv.mla_qkv_norm": _ours("mla_qkv:mla_qkv_norm"),
    "mla_absorb.absorb_q": (
        *_ours("mla_absorb:absorb_q_small", max_size=SMALL_TOKENS),
        *_ours("mla_absorb:absorb_q_many", when="millrace_kernels.triton.mla_absorb:absorb_is_measured"),
        *_ours("mla_absorb:absorb_q"),
    ),
    "mla_absorb.project_v_quant": (
        *_ours(
            "mla_absorb:project_v_quant", when="millrace_kernels.triton.mla_absorb:project_quant_is_measured", on=E4M3
        ),
        REFERENCE,
    ),
    "mla_expand.expand_kv": _ours("mla_expand:expand_kv"),
    "mla_expand.rope_q": _ours("mla_expand:rope_q"),
    "merge_state.merge_state": _ours("merge_state:merge_state"),
    "kv_gather.kv_gather": _ours("kv_gather:kv_gather"),
    "page_sum.page_sums": _ours("page_sum:page_sums"),
    "mla_decode.plan": (KernelChoice("millrace_kernels.lib.flash_mla:schedule", needs="flash_mla"),),
    "mla_decode.mla_decode": (
        KernelChoice("millrace_kernels.lib.flash_mla:mla_decode", needs="flash_mla"),
        *_ours("mla_decode:mla_decode"),
    ),
    "mla_prefill.plan": (KernelChoice("millrace_kernels.lib.flashinfer:schedule", needs="flashinfer"),),
    "mla_prefill.mla_prefill": (
        KernelChoice("millrace_kernels.lib.flashinfer:mla_prefill", needs="flashinfer"),
        *_ours("mla_prefill:mla_prefill"),
    ),
    # sparse attention
    "indexer.index_queries": _ours("indexer:index_queries", on=E4M3),
    "indexer.index_store": _ours("indexer:index_store", on=E4M3),
    "indexer.masked": _ours("indexer:masked"),
    "indexer.chosen_rows": _ours("indexer:chosen_rows"),
    "indexer.top_keys": (KernelChoice("millrace_kernels.lib.flashinfer:top_keys", needs="flashinfer"), REFERENCE),
    "indexer.plan": (KernelChoice("millrace_kernels.lib.deep_gemm_indexer:schedule", needs="deep_gemm"),),
    "indexer.index_logits": (KernelChoice("millrace_kernels.lib.deep_gemm_indexer:index_logits", needs="deep_gemm"),),
    "mla_sparse.mla_sparse": (
        *_ours("indexer:mla_sparse", when="millrace_kernels.lib.flash_mla:sparse_is_slower"),
        KernelChoice("millrace_kernels.lib.flash_mla:mla_sparse", needs="flash_mla"),
        *_ours("indexer:mla_sparse"),
    ),
}

PHASES = ("mla_decode", "mla_prefill")  # absorbed and expanded attention: an op, and its plan

_forced: dict[str, str] = {}
_preferred: dict[str, str] = {}


@functools.cache
def capability(device: torch.device) -> str:
    """`cpu`, or `sm90` for a CUDA device of compute capability 9.0, `sm100` for 10.0."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def implementation(op: str, device: torch.device, size: int = 0, shape: tuple[int, ...] = ()) -> Kernel | None:
    """The function that runs `op` on tensors of `device`, with the signature of the op; None: its reference does.
    `shape` is the weight's.
    """
    if device.type == "cpu" and not _forced and not _preferred:
        return None
    target = _forced.get(op, _preferred.get(op))
    if target is None:
        rows = _available(op, capability(device))
        target = next((choice.target for choice in rows if choice.serves(size, shape)), "")
    return _load(target) if target else None


def choices(op: str, device: torch.device) -> tuple[KernelChoice, ...]:
    """The rows of `op` that can run on `device`, best first: right capability, library there."""
    return _available(op, capability(device))


def prefer(libraries: Sequence[str], device: torch.device) -> None:
    """From now on each phase of attention runs the kernel of the first of `libraries` that has one; a phase for which
    none has one runs what is the fastest. FlashMLA's hands steps of few sequences to ours all the same.

    Raises ValueError for a library without kernels of attention for this device.
    """
    _preferred.clear()
    found: dict[str, str] = {}
    for library in libraries:
        kernels = {phase: target for phase in PHASES if (target := _of_library(f"{phase}.{phase}", library, device))}
        if not kernels:
            raise ValueError(f"attention={library}: not installed, or without a kernel for {capability(device)}")
        for phase, target in kernels.items():
            found = {f"{phase}.{phase}": target, f"{phase}.plan": _of_library(f"{phase}.plan", library, device)} | found
    _preferred.update(found)
    log.info("attention: %s", found or "what is the fastest")


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


def _of_library(op: str, library: str, device: torch.device) -> str:
    """The target of the library's row of `op` on this device; empty: it has none."""
    rows = _available(op, capability(device))
    return next((row.target for row in rows if row.needs == library), "")


@functools.cache
def _load(target: str) -> Kernel:
    path, name = target.split(":")
    return getattr(importlib.import_module(path), name)


@functools.cache
def _available(op: str, capability: str) -> tuple[KernelChoice, ...]:
    return tuple(row for row in TABLE.get(op, ()) if row.runs_on(capability) and _has(row.needs))


@functools.cache
def _has(library: str) -> bool:
    """Whether the library imports; logs once when it does not."""
    try:
        if library:
            importlib.import_module(library)
    except Exception as error:  # a library may fail in any way, above all when it meets another CUDA
        log.warning("%s cannot be used, the next best library runs: %s: %s", library, type(error).__name__, error)
        return False
    return True
