"""Sparse attention's ops: the reference against the paper's formula, our kernels in Triton's interpreter and what the
adapters hand to DeepGEMM and FlashMLA, whose stand-ins compute with the references.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels.indexer_inputs import PAGE_ROWS, first_of_equals
from millrace_kernels import indexer
from millrace_kernels.backend import forced
from millrace_kernels.indexer import IndexRows
from millrace_kernels.lib import deep_gemm_indexer, flashinfer
from millrace_kernels.lib import flash_mla as library_kernels
from millrace_kernels.mla_sparse import by_copies, mla_sparse, pool_rows
from millrace_kernels.testing.attention_inputs import LATENT, PAGE, ROW, SCALE, Draw
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, rms_error
from millrace_testing.tolerances import ATTENTION_TOLERANCE, assert_close
from torch import Tensor

from kernels import indexer_inputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU test_gpu_indexer.py runs the kernels")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TRITON = "millrace_kernels.triton.indexer"


def values(rows: IndexRows) -> Tensor:
    """float32; NaN where nothing was stored."""
    data = rows.data.float()
    return data if rows.scales is None else data * rows.scales.unsqueeze(-1)


@pytest.mark.parametrize(("num", "heads"), [(0, 1), (1, 64), (5, 1)])
def test_rows_rotate_in_halves(num: int, heads: int) -> None:
    call = indexer_inputs.index_queries(Draw(), num, heads, exact=True)
    cos, sin, half = call["cos"][:, None], call["sin"][:, None], call["cos"].shape[1]
    pairs = torch.complex(call["x"][..., :half], call["x"][..., half : 2 * half]) * torch.complex(cos, sin)
    found, weights = indexer.index_queries(**call)
    assert torch.equal(weights, call["weights"])
    assert_close(found, torch.cat((pairs.real, pairs.imag, call["x"][..., 2 * half :]), -1))


def test_products_survive_the_transform() -> None:
    call = indexer_inputs.index_queries(Draw(), 40, 2)
    call["x"][..., 5] *= 30  # an outlier, which alone would take the range of its row
    rows = (values(indexer.rotated_rows(call["x"], call["cos"], call["sin"], exact)) for exact in (True, False))
    products = [x[:, 0] @ x[:, 1].T for x in rows]
    assert rms_error(products[1], products[0]) < FP8_TOLERANCE
    matrix = indexer.hadamard(128, torch.device("cpu"))
    assert torch.equal(matrix, matrix.T)
    assert_close(matrix @ matrix, torch.eye(128))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("per_row", [True, False])
def test_logits_are_the_papers(per_row: bool, exact: bool) -> None:
    lens = [130, 1, 64, 65]
    call = indexer_inputs.index_logits(Draw(), lens, per_row, exact)
    found, queries, cache = indexer.index_logits(**call), call["q"].float(), values(call["cache"]).flatten(0, 1)
    assert found.shape == (4, 3 * PAGE)
    for token, num in enumerate(lens):
        table = call["page_table"][token if per_row else 0]
        for key in (0, num - 1, num // 2):
            k = cache[int(table[key // PAGE]) * PAGE + key % PAGE]
            wanted = sum(w * torch.relu(q @ k) for w, q in zip(call["weights"][token], queries[token], strict=True))
            assert_close(found[token, key], wanted, 1e-5)
        assert (found[token, num:] == -torch.inf).all()


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("target", ["", f"{TRITON}:chosen_rows"])
@pytest.mark.parametrize(("lens", "topk"), [([130, 3, 64, 16, 17], 16), ([3], 100)])
def test_rows_of_the_largest(lens: list[int], topk: int, target: str, per_row: bool) -> None:
    call = indexer_inputs.chosen_rows(Draw(), lens, topk, per_row)
    with forced(**{"indexer.chosen_rows": target}):
        found = indexer.chosen_rows(**call)
    assert found.shape == (len(lens), topk) and found.dtype == torch.int32
    for token, num in enumerate(lens):
        table, best = call["page_table"][token if per_row else 0], call["logits"][token].argsort(descending=True)
        wanted = {int(table[key // PAGE]) * PAGE_ROWS + int(key) % PAGE for key in best[: min(num, topk)]}
        rows = found[token].tolist()
        assert set(rows[: len(wanted)]) == wanted and rows[len(wanted) :] == [-1] * (topk - len(wanted))


@pytest.mark.parametrize(("num", "heads"), [(0, 3), (1, 64), (17, 1), (17, 3)])
def test_our_kernel_of_queries(num: int, heads: int) -> None:
    call = indexer_inputs.index_queries(Draw(dtype=BF16), num, heads)
    with forced(**{"indexer.index_queries": f"{TRITON}:index_queries"}):
        data, weights = indexer.index_queries(**call)
    exact, given = indexer.index_queries(**call | {"exact": True})
    unturned = data.float() * (weights / given).unsqueeze(-1) @ indexer.hadamard(128, data.device)
    assert data.dtype == E4M3 and data.is_contiguous() and rms_error(unturned, exact) < FP8_TOLERANCE


def test_our_kernel_masks() -> None:
    lens = torch.tensor([1, 4096, 5000, 4097, 9000], dtype=torch.int32)
    logits = Draw()(5, 9100)[:, :9000]
    wanted = indexer.masked(logits.clone(), lens)
    with forced(**{"indexer.masked": f"{TRITON}:masked"}):
        assert indexer.masked(logits, lens) is logits
    assert torch.equal(logits, wanted) and (wanted == -torch.inf).sum(1).tolist() == (9000 - lens).tolist()


@pytest.mark.parametrize("num", [0, 1, 17, 100])
def test_our_kernel_stores_keys(num: int) -> None:
    stored = []
    for target in (f"{TRITON}:index_store", ""):
        call = indexer_inputs.index_store(Draw(dtype=BF16), num)
        with forced(**{"indexer.index_store": target}):
            indexer.index_store(**call)
        stored.append(values(call["cache"]))
    found, wanted = stored
    assert torch.equal(found.isnan(), wanted.isnan()) and int((~found[..., 0].isnan()).sum()) == num
    assert rms_error(found.nan_to_num(), wanted.nan_to_num()) < FP8_TOLERANCE


@pytest.mark.parametrize(
    ("target", "kv_dtype"),
    [("", BF16), ("", E4M3), (f"{TRITON}:mla_sparse", torch.float32), (f"{TRITON}:mla_sparse", E4M3)],
)
def test_attention_to_chosen_rows(target: str, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_kernels.mla_sparse.COPIED_BYTES", 3 * 40 * ROW * 4)  # more than one part
    call = indexer_inputs.mla_sparse(Draw(), [130, 1, 40, 20], 40, 3, kv_dtype)
    with forced(**{"mla_sparse.mla_sparse": target}):
        found, kv = mla_sparse(**call), call["kv"].float()
    for token, rows in enumerate(call["chosen"]):
        rows = rows[rows >= 0].long()
        keys = kv[rows // PAGE_ROWS, rows % PAGE_ROWS]
        probs = (SCALE * call["q"][token] @ keys.T).softmax(-1)
        assert_close(found[token], probs @ keys[:, :LATENT], ATTENTION_TOLERANCE[torch.float32])


# ------------------------------------------------------------------------------------------------ adapters


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls; its checks are those of the library's sources."""
    calls: list[str] = []

    def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
        assert context_lens.dim() == 2 and context_lens.dtype == torch.int32 and context_lens.is_contiguous()
        calls.append("schedule")
        return torch.zeros(num_sms + 1, 2, dtype=torch.int32)

    def check(q: Tensor, weights: Tensor) -> None:
        assert q.dtype == E4M3 and q.is_contiguous() and q.shape[-2] in (32, 64) and weights.dtype == torch.float32
        assert weights.is_contiguous() and weights.shape[1] == q.shape[-2]

    def unwritten(logits: Tensor, lens: Tensor) -> Tensor:
        return logits.masked_fill(logits == -torch.inf, torch.nan)

    def fp8_paged_mqa_logits(
        q: Tensor, kv: Tensor, weights: Tensor, lens: Tensor, table: Tensor, schedule: Tensor, most: int
    ) -> Tensor:
        check(q, weights)
        width = q.shape[-1]
        assert kv.dtype == torch.uint8 and kv.shape[1:] == (PAGE, 1, width + 4) and kv.stride(0) % 16 == 0
        assert kv.stride(1) == width + 4 and kv.stride(3) == 1 and schedule.shape == (133, 2) and q.dim() == 4
        assert lens.shape == (len(q), q.shape[1]) and table.dtype == torch.int32 and table.stride(1) == 1
        calls.append("paged")
        pages = kv.as_strided((len(kv), PAGE * (width + 4)), (kv.stride(0), 1))
        cache = indexer.cached_rows(pages, 0, PAGE, width, exact=False)
        return unwritten(indexer.reference_logits(q[:, 0], weights, cache, table, lens[:, 0]), lens)[:, :most]

    def fp8_mqa_logits(q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, ks: Tensor, ke: Tensor) -> Tensor:
        check(q, weights)
        data, scales = kv
        assert data.dtype == E4M3 and data.is_contiguous() and scales.shape == data.shape[:1]
        assert scales.dtype == torch.float32 and ks.dtype == ke.dtype == torch.int32 and not ks.any()
        calls.append("gathered")
        products = torch.relu(q.float() @ (data.float() * scales[:, None]).T)
        return unwritten(indexer.masked((weights[:, None] @ products)[:, 0], ke), ke)

    library: Any = ModuleType("deep_gemm")
    for function in (get_paged_mqa_logits_metadata, fp8_paged_mqa_logits, fp8_mqa_logits):
        setattr(library, function.__name__, function)
    library.get_num_sms = lambda: 132
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    return calls


@pytest.mark.parametrize(("per_row", "name"), [(True, "paged"), (False, "gathered")])
def test_deep_gemm_gets_pages_or_keys(deep_gemm: list[str], per_row: bool, name: str) -> None:
    call = indexer_inputs.index_logits(Draw(dtype=BF16), [130, 1, 64, 65], per_row)
    plan = deep_gemm_indexer.schedule(call["lens"]) if per_row else None
    found = deep_gemm_indexer.index_logits(**call, plan=plan)
    assert deep_gemm == [*(["schedule"] if per_row else []), name]
    assert_close(found, indexer.index_logits(**call), 1e-5)


@pytest.mark.parametrize("most", [2048, 15])
def test_flashinfer_selects_keys(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets contiguous rows, and no more keys to choose than it takes."""

    def top_k_ragged_transform(logits: Tensor, offsets: Tensor, lens: Tensor, k: int, *, tie_break: int) -> Tensor:
        assert all(x.is_contiguous() for x in (logits, offsets, lens)) and not offsets.any() and k <= most
        assert offsets.shape == lens.shape == logits.shape[:1] and offsets.dtype == lens.dtype == torch.int32
        return first_of_equals(logits, lens, k)

    library: Any = ModuleType("flashinfer")
    library.top_k_ragged_transform, library.TopKTieBreak = top_k_ragged_transform, SimpleNamespace(SMALL=1)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(flashinfer, "MOST_CHOSEN", most)
    call = indexer_inputs.chosen_rows(Draw(), [130, 3, 64, 16, 17], 16, True)
    wanted = indexer.chosen_rows(**call).sort().values
    call["logits"] = F.pad(call["logits"], (0, 64))[:, :-64]
    with forced(**{"indexer.top_keys": "millrace_kernels.lib.flashinfer:top_keys"}):
        assert torch.equal(indexer.chosen_rows(**call).sort().values, wanted)


def test_plans_of_all_sizes_are_compiled_ahead(deep_gemm: list[str]) -> None:
    with forced(**{"indexer.plan": "millrace_kernels.lib.deep_gemm_indexer:schedule"}):
        indexer.compile_ahead(64, torch.device("cpu"))  # of 1 to 32 and of 33 to 64 tokens
    assert deep_gemm == ["schedule"] * 2


def test_deep_gemm_leaves_others_to_the_reference(deep_gemm: list[str]) -> None:
    for call in (
        indexer_inputs.index_logits(Draw(), [70, 2], True, exact=True),
        indexer_inputs.index_logits(Draw(), [70, 2], True, heads=16),
    ):
        assert_close(deep_gemm_indexer.index_logits(**call), indexer.index_logits(**call))
    assert deep_gemm == [] and deep_gemm_indexer.schedule(torch.empty(0, dtype=torch.int32)) is None


@pytest.fixture
def flash_mla(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of its queries."""
    calls: list[tuple[int, ...]] = []

    def flash_mla_sparse_fwd(
        q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, use_legacy: bool, return_log2_lse: bool
    ) -> tuple[Tensor, None, None]:
        tokens, heads, width = q.shape
        assert use_legacy and not return_log2_lse and heads in (64, 128) and d_v == 512 and q.is_contiguous()
        assert q.dtype == kv.dtype == BF16 and kv.shape[1:] == (1, 576) == (1, width) and kv.stride(2) == 1
        assert kv.stride(0) == 576
        assert indices.dtype == torch.int32 and indices.shape[:2] == (tokens, 1) and indices.shape[2] % 128 == 0
        assert indices.max() < len(kv)
        calls.append(tuple(q.shape))
        out = torch.empty(tokens, heads, d_v)
        for token, chosen in enumerate(indices[:, 0].long()):
            keys = kv[chosen[chosen >= 0], 0].float()
            out[token] = (sm_scale * q[token].float() @ keys.T).softmax(-1) @ keys[:, :d_v]
        return out.to(BF16), None, None

    library: Any = ModuleType("flash_mla")
    library.flash_mla_sparse_fwd, library.has_legacy = flash_mla_sparse_fwd, lambda: True
    monkeypatch.setitem(sys.modules, "flash_mla", library)
    return calls


@pytest.mark.parametrize(("heads", "padded"), [(3, 64), (64, 64), (100, 128)])
def test_flash_mla_reads_rows_in_place(flash_mla: list[tuple[int, ...]], heads: int, padded: int) -> None:
    call = indexer_inputs.mla_sparse(Draw(dtype=BF16), [300, 1, 70], 128, heads, BF16)
    found = library_kernels.mla_sparse(**call)
    assert flash_mla == [(3, padded, ROW)]
    kv = call["kv"]
    wide = {"q": call["q"].float(), "kv": pool_rows(kv).float().as_strided(kv.shape, kv.stride())}
    assert_close(found, by_copies(**call | wide))


@pytest.mark.parametrize(
    ("topk", "heads", "dtype", "lens"),
    [
        (100, 2, BF16, [300, 1, 70]),
        (128, 2, E4M3, [300, 1, 70]),
        pytest.param(128, 130, BF16, [1], marks=pytest.mark.long),
    ],
)
def test_flash_mla_leaves_others_to_our_kernel(
    flash_mla: list[tuple[int, ...]], topk: int, heads: int, dtype: torch.dtype, lens: list[int]
) -> None:
    call = indexer_inputs.mla_sparse(Draw(), lens, topk, heads, dtype)
    call["q"] = call["q"].to(BF16)
    kv = call["kv"]
    wide = {} if dtype == E4M3 else {"kv": pool_rows(kv).float().as_strided(kv.shape, kv.stride())}
    assert_close(library_kernels.mla_sparse(**call), by_copies(**call | wide | {"q": call["q"].float()}))
    assert flash_mla == []
