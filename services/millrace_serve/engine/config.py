"""Limits of one engine. Everything is resolved: "auto" values are turned into numbers before this object is made."""

from __future__ import annotations

import enum

from pydantic import BaseModel, ConfigDict, Field


class Role(enum.StrEnum):
    PREFILL = "prefill"  # EXPORT requests only
    DECODE = "decode"  # IMPORT requests, and LOCAL ones
    UNIFIED = "unified"  # LOCAL requests


class EngineConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    num_pages: int = Field(ge=2)  # pages of the KV pool, the sink included
    max_model_len: int = Field(ge=2)  # tokens of one sequence, prompt and outputs
    page_size: int = Field(64, ge=1)  # tokens
    max_running: int = Field(64, ge=1)  # sequences in one step
    max_waiting: int = Field(256, ge=0)  # sequences queued beyond max_running; more are refused as OVERLOADED
    max_prefill_tokens: int = Field(2048, ge=1)  # prompt tokens per step over all sequences; decode tokens come on top
    max_parked_pages: int | None = Field(None, ge=1)  # pages that prompts may hold until their lease ends; None = pool
    prefix_cache: bool = True
    overlap: bool = True  # schedule step N+1 while step N runs
    canary: bool = False  # debug: every page carries the hash of its tokens, checked before each step
    poison: bool = False  # debug: freed pages are filled with NaN

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)
