"""Attention, with an optimisation and without it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from unittest import mock

import torch
from millrace_kernels import mla_decode
from millrace_kernels.fp8 import Operand
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_absorb import absorb_q
from millrace_kernels.mla_qkv import kv_store, mla_qkv_norm
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.rope import rope
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import LATENT, NOPE, ROPE, ROW, VALUE, Draw
from torch import Tensor

from millrace_bench.kernels.case import forced
from millrace_bench.onoff_pairs import Call, MakePairs, Pair, Sizes


def few_sequences(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A2: a few sequences are decoded by our split-KV kernel; without, by FlashMLA, where it is installed."""

    def make(batch: int, keys: int) -> tuple[Call, Call]:
        inputs = attention_inputs.mla_decode(_draw(device), (keys,) * batch, 1, size.heads[0], torch.bfloat16)

        def call(plan: object) -> tuple[Tensor, ...]:
            return mla_decode.mla_decode(**inputs, plan=plan)

        ours = functools.partial(call, None)
        if device.type != "cuda":  # the reference stands for the library
            return ours, functools.partial(forced, "mla_decode.mla_decode", "", ours)  # type: ignore[return-value]
        from millrace_kernels.lib import flash_mla

        with mock.patch.object(flash_mla, "FEW_SEQS", 0):
            plan = flash_mla.schedule(inputs["seq_lens"], 1, size.heads[0], torch.bfloat16)
        assert plan is not None, "FlashMLA does not serve this GPU"
        return ours, functools.partial(call, plan)

    for batch in (1, 4):
        for keys in size.contexts:
            shape = f"B={batch} L={keys} H={size.heads[0]}"
            yield Pair("A2", shape, functools.partial(make, batch, keys), 2 * batch * keys * ROW, 3e-2)


def merged_states(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A4: two partial attentions are merged by one kernel; without, by PyTorch's operations."""

    def make(num: int, heads: int) -> tuple[Call, Call]:
        call = functools.partial(merge_state, **attention_inputs.merge_state(_draw(device), num, heads))
        return call, functools.partial(forced, "merge_state.merge_state", "", call)  # type: ignore[return-value]

    for num in size.tokens:
        for heads in size.heads:
            nbytes = 4 * num * heads * VALUE
            yield Pair("A4", f"T={num} H={heads}", functools.partial(make, num, heads), nbytes)


def no_copies(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A5: queries are absorbed where they lie; without, heads are moved to the front and back, and parts joined."""

    def make(num: int, heads: int) -> tuple[Call, Call]:
        inputs = attention_inputs.absorb_q(_draw(device), num, heads)
        q, w_uk, cos, sin = (inputs[name] for name in ("q", "w_uk", "cos", "sin"))

        def off() -> tuple[Tensor, ...]:
            nope = q[..., :NOPE].transpose(0, 1).contiguous()
            latent = torch.bmm(nope, w_uk).transpose(0, 1).contiguous()
            return (torch.cat((latent, rope(q[..., NOPE:], cos, sin)), -1),)

        return lambda: (absorb_q(**inputs),), off

    for num in size.tokens:
        for heads in size.heads:
            shape, nbytes = f"T={num} H={heads}", 2 * heads * NOPE * LATENT
            yield Pair("A5", shape, functools.partial(make, num, heads), nbytes)


def one_pass(size: Sizes, device: torch.device) -> Iterator[Pair]:
    """A7, A8, A9: both norms, rotation and the write into the pool in one kernel; without, a kernel for each."""

    def make(num: int) -> tuple[Call, Call]:
        inputs = attention_inputs.mla_qkv_norm(_draw(device), num, size.q_rank, True, torch.bfloat16)

        def on() -> tuple[Tensor, ...]:
            q, c_kv, k_pe = mla_qkv_norm(**inputs)
            return *_tensors(q), c_kv, k_pe

        def off() -> tuple[Tensor, ...]:
            q, c_kv, k_pe = inputs["qkv"].split((size.q_rank, LATENT, ROPE), -1)
            normed, _ = rms_norm(q, None, inputs["q_weight"], inputs["eps"], quant=True)
            latent, _ = rms_norm(c_kv, None, inputs["kv_weight"], inputs["eps"])
            rotated = rope(k_pe, inputs["cos"], inputs["sin"])
            assert latent.plain is not None
            kv_store(inputs["kv"], inputs["slots"], latent.plain, rotated)
            return *_tensors(normed), latent.plain, rotated

        return on, off

    for num in size.tokens:
        yield Pair("A7", f"T={num}", functools.partial(make, num), 2 * num * (size.q_rank + ROW), 5e-2)


def _tensors(x: Operand) -> tuple[Tensor, ...]:
    """The forms that there are."""
    return tuple(form for form in (x.plain, *(x.fp8 or ())) if form is not None)


def _draw(device: torch.device) -> Draw:
    return Draw(device.type, torch.bfloat16)


PAIRS: dict[str, MakePairs] = {"A2": few_sequences, "A4": merged_states, "A5": no_copies, "A7": one_pass}
