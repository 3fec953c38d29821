"""What the adapters of FlashMLA and FlashInfer hand to their libraries: layouts, lengths, units, and who runs what the
library does not take. The libraries are stand-ins here that compute with the references.
"""

import gc
import math
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from millrace_kernels import mla_decode, mla_prefill
from millrace_kernels.lib import flash_mla, flashinfer
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import Draw
from millrace_testing.tolerances import FP8_ATTENTION_TOLERANCE, assert_close
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU test_gpu_attention.py runs the libraries")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")


@dataclass
class SchedMeta:
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


class FlashMla(ModuleType):
    """Its checks are those of the library's sources."""

    def __init__(self) -> None:
        super().__init__("flash_mla")
        self.interface = ModuleType("flash_mla.flash_mla_interface")
        self.interface.FlashMLASchedMeta = SchedMeta
        self.decoded = 0

    def has_legacy(self) -> bool:
        return True

    def get_mla_decoding_metadata(
        self,
        seqlens_k: Tensor,
        num_q_tokens_per_head_k: int,
        h_k: int,
        h_q: int | None = None,
        is_fp8_kvcache: bool = False,
        topk: int | None = None,
        use_legacy: bool = False,
    ) -> tuple[Any, Any]:
        assert use_legacy and seqlens_k.dtype == torch.int32 and seqlens_k.is_contiguous() and len(seqlens_k)
        return (seqlens_k, num_q_tokens_per_head_k, is_fp8_kvcache), "splits"

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: SchedMeta,
        softmax_scale: float,
        causal: bool,
        is_fp8_kvcache: bool,
        use_legacy: bool,
        descale_q: Tensor | None,
        descale_k: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        lens, rows, fp8 = tile_scheduler_metadata.tile_scheduler_metadata
        assert use_legacy and fp8 == is_fp8_kvcache == (descale_q is not None) == (descale_k is not None)
        assert lens is cache_seqlens and rows == q.shape[1] * q.shape[2] and tile_scheduler_metadata.num_splits
        assert q.dtype == k_cache.dtype and q.is_contiguous() and k_cache.shape[1:] == (64, 1, 576) and causal
        assert not fp8 or int(lens.min()) >= 1
        self.decoded += 1
        kv = k_cache.squeeze(2)
        out, lse = mla_decode.mla_decode(q.float(), kv, block_table, cache_seqlens, softmax_scale, head_dim_v)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return out.to(BF16), lse.transpose(1, 2).contiguous()  # [B, H, S]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashMla:
    fake = FlashMla()
    monkeypatch.setitem(sys.modules, "flash_mla", fake)
    monkeypatch.setitem(sys.modules, "flash_mla.flash_mla_interface", fake.interface)
    monkeypatch.setattr(flash_mla, "FEW_SEQS", 0)
    return fake


def expected_decode(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    kv = call["kv"] if call["kv"].dtype == E4M3 else call["kv"].float()
    return mla_decode.mla_decode(**(call | {"q": call["q"].float(), "kv": kv}))


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
def test_flash_mla_decodes_bf16(library: FlashMla, queries: int, planned: bool) -> None:
    call = attention_inputs.mla_decode(Draw(dtype=BF16), (70, 3, 128), queries, 2, BF16)
    plan = flash_mla.schedule(call["seq_lens"], queries, 2, BF16) if planned else None
    out, lse = flash_mla.mla_decode(**call, plan=plan)
    wanted, wanted_lse = expected_decode(call)
    assert library.decoded == 1 and lse.shape == (3, queries, 2)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)


def test_flash_mla_decodes_fp8_and_never_sees_a_length_of_0(library: FlashMla) -> None:
    call = attention_inputs.mla_decode(Draw(dtype=BF16), (70, 0, 128), 1, 2, E4M3)
    call["q"][0, 0, 0, 0] = 1000.0  # more than E4M3 holds
    call["kv"][0] = 0.0  # the null page, which stands in for what a sequence of length 0 does not have
    plan = flash_mla.schedule(call["seq_lens"], 1, 2, E4M3)
    out, _ = flash_mla.mla_decode(**call, plan=plan)
    call["q"].clamp_(-448, 448)
    wanted, _ = expected_decode(call)
    assert library.decoded == 1 and call["seq_lens"].tolist() == [70, 0, 128]
    assert_close(out[[0, 2]], wanted[[0, 2]], FP8_ATTENTION_TOLERANCE)
    assert out.isfinite().all()


@pytest.mark.parametrize(("dtype", "queries", "decoded"), [(E4M3, 64, 1), (E4M3, 65, 0), (BF16, 65, 1)])
def test_more_than_64_queries_over_e4m3_are_ours(
    library: FlashMla, dtype: torch.dtype, queries: int, decoded: int
) -> None:
    """The library's FP8 kernel would let the first of them see keys that come after them."""
    call = attention_inputs.mla_decode(Draw(dtype=BF16), (65,), queries, 1, dtype)
    plan = flash_mla.schedule(call["seq_lens"], queries, 1, dtype)
    out, _ = flash_mla.mla_decode(**call, plan=plan)
    assert (plan is not None, library.decoded) == (bool(decoded), decoded)
    assert_close(out, expected_decode(call)[0], FP8_ATTENTION_TOLERANCE)


def test_few_rows_of_few_sequences_are_ours(library: FlashMla, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "FEW_SEQS", 2)
    cases = (((70, 3), 16, False), ((70, 3), 17, True), ((70, 3, 9), 16, True), ((70,), 32, False), ((70,), 33, True))
    for lens, queries, planned in cases:
        plan = flash_mla.schedule(torch.tensor(lens, dtype=torch.int32), queries, 2, BF16)
        assert (plan is not None) == planned


def test_what_flash_mla_does_not_take_is_ours(library: FlashMla) -> None:
    wide = attention_inputs.mla_decode(Draw(), (70,), 1, 2, torch.float32)
    assert flash_mla.schedule(wide["seq_lens"], 1, 2, torch.float32) is None
    assert_close(flash_mla.mla_decode(**wide)[0], expected_decode(wide)[0], 1e-5)
    empty = attention_inputs.mla_decode(Draw(dtype=BF16), (), 1, 2, BF16)
    assert flash_mla.mla_decode(**empty)[0].shape == (0, 1, 2, 512)
    assert library.decoded == 0


@dataclass
class Wrapper:
    """BatchPrefillWithRaggedKVCacheWrapper"""

    workspace: Tensor
    layout: str
    backend: str
    planned: dict[str, Any] = field(default_factory=dict)

    def reset_workspace_buffer(self, workspace: Tensor, int_workspace: Tensor) -> None:
        self.int_workspace = int_workspace

    def plan(
        self, q_starts: Tensor, k_starts: Tensor, q_heads: int, kv_heads: int, qk_dim: int, v_dim: int, **options: Any
    ) -> None:
        assert (self.layout, self.backend) == ("NHD", "fa3") and q_starts.dtype == k_starts.dtype == torch.int32
        assert q_heads == kv_heads and (qk_dim, v_dim) == (192, 128)
        assert options["q_data_type"] == options["kv_data_type"] == BF16
        lens = [tuple(starts.diff().tolist()) for starts in (q_starts, k_starts)]
        assert all(lens[1]), "queries without keys spoil the sequences after them"
        self.planned = {"q_lens": lens[0], "k_lens": lens[1], "scale": options["sm_scale"], "causal": options["causal"]}

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, return_lse: bool) -> None:
        assert len(q) == sum(self.planned["q_lens"]) == len(out) and len(k) == sum(self.planned["k_lens"])
        assert return_lse and out.is_contiguous() and lse.is_contiguous()
        result = mla_prefill.mla_prefill(q.float(), k.float(), v.float(), **self.planned)
        out.copy_(result[0])
        lse.copy_(result[1] / math.log(2.0))


class Event:
    def __init__(self, done: bool = True) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> list[flashinfer._Slot]:
    """The idle ones; the first was used to see whether the library works."""
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    flashinfer._works.cache_clear()
    flashinfer._free_slots.clear()
    assert flashinfer._works(CPU)
    gc.collect()
    yield flashinfer._free_slots[CPU]
    flashinfer._works.cache_clear()
    flashinfer._free_slots.clear()


def schedule(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool) -> flashinfer.FlashInferPlan | None:
    return flashinfer.schedule(q_lens, k_lens, mla_prefill.Heads(2, 192, 128), causal, CPU, BF16)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal"),
    [
        ((5, 70), (5, 70), True),
        ((5, 2, 3), (70, 3, 64), False),
        ((4, 5, 2, 3, 6), (0, 70, 0, 64, 0), False),
        ((5, 0, 3), (70, 0, 64), False),
    ],
    ids=["own", "prefix", "some-without-keys", "nobody"],
)
def test_flashinfer_prefill(
    wrappers: list[flashinfer._Slot], q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, planned: bool
) -> None:
    call = attention_inputs.mla_prefill(Draw(dtype=BF16), q_lens, k_lens, 2, causal)
    wide = {name: value.float() if isinstance(value, Tensor) else value for name, value in call.items()}
    plan = schedule(q_lens, k_lens, causal) if planned else None
    out, lse = flashinfer.mla_prefill(**call, plan=plan)
    wanted, wanted_lse = mla_prefill.mla_prefill(**wide)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse)


def test_wrapper_serves_one_plan_at_a_time(wrappers: list[flashinfer._Slot]) -> None:
    call = attention_inputs.mla_prefill(Draw(dtype=BF16), (5,), (5,), 2, True)
    assert len(wrappers) == 1
    first, second = schedule((5,), (5,), True), schedule((5,), (5,), False)
    for plan in (first, second):
        flashinfer.mla_prefill(**call, plan=plan)
    assert first._slot is not second._slot and wrappers == []
    slot = first._slot
    del first, plan
    gc.collect()
    assert wrappers == [slot]
    slot.copied.done = False  # the copy of its last plan is still to come
    third = schedule((5,), (5,), True)
    flashinfer.mla_prefill(**call, plan=third)
    assert third._slot is not slot and wrappers == [slot]


def test_large_plan_has_room_for_its_tiles(wrappers: list[flashinfer._Slot]) -> None:
    plan = flashinfer.FlashInferPlan((65536,), (65536,), 128, True, CPU)
    assert plan._work_bytes() > flashinfer.LEAST_WORKSPACE
    slot = flashinfer._take(wrappers, CPU, plan._work_bytes())
    assert slot.size >= plan._work_bytes() and len(wrappers) == 1


def test_what_flashinfer_does_not_take_is_ours(
    wrappers: list[flashinfer._Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = attention_inputs.mla_prefill(Draw(), (5,), (5,), 2, True)
    assert_close(flashinfer.mla_prefill(**call)[0], mla_prefill.mla_prefill(**call)[0], 1e-5)
    nothing = attention_inputs.mla_prefill(Draw(dtype=BF16), (5,), (0,), 2, False)
    out, lse = flashinfer.mla_prefill(**nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_library_that_does_not_compile_is_named_and_left(
    wrappers: list[flashinfer._Slot], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer._works.cache_clear()
    monkeypatch.setattr(Wrapper, "plan", Mock(side_effect=RuntimeError("Could not find nvcc")))
    call = attention_inputs.mla_prefill(Draw(dtype=BF16), (5,), (5,), 2, True)
    for _ in range(2):
        flashinfer.mla_prefill(**call)
    assert [record.getMessage() for record in caplog.records] == [
        "flashinfer cannot be used, the next best runs: RuntimeError: Could not find nvcc"
    ]
