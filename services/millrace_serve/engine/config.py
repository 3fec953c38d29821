"""Limits of one engine, and its use of the device.

`Limits` are as configured; `EngineConfig` is the same with everything resolved: every "auto" is a number.
"""

import enum
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from millrace_common.config import Config, Count, OrAuto
from millrace_common.json_values import Json
from pydantic import BeforeValidator, Field, model_validator

from millrace_serve.engine.core import Route
from millrace_serve.engine.drafts.limits import DraftLimits
from millrace_serve.engine.offload.limits import TierLimits


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    FLEXIBLE = "flexible"

    @property
    def routes(self) -> list[Route]:
        """Of the requests that it serves."""
        by_role = {Role.PREFILL: [Route.EXPORT], Role.DECODE: [Route.IMPORT, Route.LOCAL], Role.UNIFIED: [Route.LOCAL]}
        return by_role.get(self, [*Route])


GIB = 1 << 30
WARM_UP_OUTPUTS = 4  # of each request with which a worker warms itself up


def shared_tokens(prompt_tokens: int) -> int:
    """Rows for the part of a shared chunk, in a step with so many. Even, so that no division of a chunk exceeds it."""
    return max(prompt_tokens // 4 * 2, 1)


class Limits(TierLimits, DraftLimits):
    num_pages: Annotated[Count, Field(ge=2)] | Literal["auto"]  # KV pages, the null page included; auto: what fits
    max_model_len: Count = Field(ge=1 + WARM_UP_OUTPUTS)  # tokens of one sequence, prompt and outputs
    page_size: Count = Field(64, ge=1)  # tokens
    max_running: Annotated[int, OrAuto()] = Field(64, ge=1, le=1 << 16)  # sequences in one step
    max_waiting: Count = Field(256, ge=0)  # sequences queued beyond max_running; more are refused as OVERLOADED
    # Prompt tokens per step over all sequences; decode tokens come on top.
    max_prefill_tokens: Annotated[Count, OrAuto()] = Field(2048, ge=1)
    # Uncached tokens of a prompt from which on all replicas compute it together, with half of their steps; 0: never.
    context_parallel_tokens: Annotated[Count, OrAuto()] = Field(0, ge=0)
    # Pages that prompts may hold until their lease ends; None: the pool, on a flexible worker half of it.
    max_held_pages: Count | None = Field(None, ge=1)
    overlap: bool = True  # schedule step N+1 while step N runs
    # checksum: every page carries one, which a worker that reads the page checks. For debugging: canary, the hash of a
    # page's tokens, checked before each step; poison, freed pages are filled with NaN.
    checks: tuple[Literal["checksum", "canary", "poison"], ...] = ()

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)

    @property
    def pages_behind(self) -> int:
        """Entries of the page table behind a sequence's last page that its rows may reach. They are the sink."""
        return (self.most_queries - 1) // self.page_size + 1 if self.most_queries > 1 else 0

    @property
    def table_width(self) -> int:
        """Entries of the page table for the longest sequence."""
        return self.max_pages_per_seq + self.pages_behind

    def length_class(self, tokens: int) -> int:
        """0 for prompts of at most half of a step's tokens; each further class has prompts four times as long."""
        return ((max(tokens - 1, 0) // max(self.max_prefill_tokens // 2, 1)).bit_length() + 1) // 2

    def resolved(self, num_pages: int) -> "EngineConfig":
        """The same limits with this number of pages."""
        return EngineConfig.model_validate({**self.model_dump(), "num_pages": num_pages})


class EngineConfig(Limits):
    num_pages: int = Field(ge=2)

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1


Form = Literal["absorbed", "expanded"]  # of prompts behind cached tokens (model/attn_step.py)
Library = Literal["flash_mla", "flashinfer", "triton"]  # of kernels of attention


def _graphs(value: Json) -> Json:
    """YAML reads `on` and `off` as truth values."""
    if isinstance(value, bool):
        return {True: "on", False: "off"}[value]
    sizes = [one for one in value if type(one) is int and one > 0] if isinstance(value, list | tuple) else []
    if value not in ("auto", "on", "off") and (not sizes or len(sizes) < len(value)):
        raise ValueError("must be auto, on, off, or a list of batch sizes of at least 1")
    return value


class Execution(Config):
    """A rank's use of its device."""

    # auto: on CUDA devices; a list: numbers of sequences of a decode step, instead of those of engine/step/graphs.py
    graphs: Annotated[Literal["auto", "on", "off"] | tuple[int, ...], BeforeValidator(_graphs)] = "auto"
    # A step with at most this number of prompt tokens is a graph, except for attention. Decode rows come on top.
    # auto: 1,024 for each rank of a replica; up to there launches take longer than the work.
    chunk_graph_tokens: Annotated[Count, Field(ge=0)] | Literal["auto"] = "auto"
    compile_max_batch: Count = Field(0, ge=0)  # most rows of a decode step that torch.compile compiles; 0: off
    kv_dtype: Literal["auto", "float8_e4m3fn", "bfloat16", "float16", "float32"] = "auto"  # auto: as `dtype`
    # A form of attention, and libraries in order of preference; empty: the fastest. Decode and prompts each take the
    # first library that has a kernel for them.
    attention: tuple[Form | Library, ...] = ()
    memory_fraction: Annotated[float, OrAuto()] = Field(0.92, gt=0, le=1)  # share of the GPU's memory for this rank
    cache_dir: Path | None = None  # of compiled code; None: where libraries put it, and nothing is compiled ahead
    exchange: Literal["auto", "gather", "peer", "deepep"] = "auto"  # how rows reach the experts of other replicas
    dense_tp: Count = Field(0, ge=0)  # ranks that share a dense MLP, a divisor of tp; 1: every rank has it whole; 0: tp
    # Slots of a rank and layer for more replicas of experts with many tokens; 0: experts stay where they are loaded.
    redundant_experts: Annotated[Count, OrAuto()] = Field(0, ge=0)
    random_weights: bool = False  # random weights in the shapes of config.json, the only file that is needed
    # Of random weights, for benchmarks: the probability that 1, 2 and 3 draft tokens are accepted.
    simulated_acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()

    @property
    def form(self) -> str:
        """Of attention to cached tokens; empty: the faster one."""
        return next((word for word in self.attention if word in get_args(Form)), "")

    @property
    def libraries(self) -> tuple[str, ...]:
        """Of attention's kernels, in order of preference."""
        return tuple(word for word in self.attention if word in get_args(Library))

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if {*get_args(Form)} <= {*self.attention}:
            raise ValueError("attention: absorbed and expanded exclude each other")
        return self
