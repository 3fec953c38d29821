"""Sparse attention's kernels and libraries on a GPU, over V3.2's widths, against the references on the same GPU; and a
layer's decode step in a CUDA graph.
"""

import pytest
import torch
from kernels.graphs import captured
from millrace_kernels import backend, indexer
from millrace_kernels.indexer import IndexRows
from millrace_kernels.lib import flashinfer
from millrace_kernels.mla_sparse import by_copies, mla_sparse, pool_rows
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, rms_error
from millrace_testing.tolerances import ATTENTION_TOLERANCE, assert_close
from torch import Tensor

from kernels import indexer_inputs

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = torch.device("cuda")
LENS = [4096, 1, 64, 65, 3000, 9000]
TOPK = 2048


def values(rows: IndexRows) -> Tensor:
    assert rows.scales is not None
    return rows.data.float() * rows.scales.unsqueeze(-1)


def on_sm90() -> bool:
    return backend.capability(DEVICE) == "sm90"


@pytest.mark.parametrize("num", [0, 1, 17, 300])
def test_queries_and_keys(num: int) -> None:
    call = indexer_inputs.index_queries(Draw("cuda", BF16), num, 64)
    (data, weights), (exact, given) = (indexer.index_queries(**call | {"exact": exact}) for exact in (False, True))
    unturned = data.float() * (weights / given).unsqueeze(-1) @ indexer.hadamard(128, data.device)
    assert rms_error(unturned, exact) < FP8_TOLERANCE
    stored = []
    for target in (None, ""):
        call = indexer_inputs.index_store(Draw("cuda", BF16), num)
        with backend.forced(**({} if target is None else {"indexer.index_store": target})):
            indexer.index_store(**call)
        stored.append(values(call["cache"]))
    assert torch.equal(stored[0].isnan(), stored[1].isnan()) and int((~stored[0][..., 0].isnan()).sum()) == num
    assert rms_error(stored[0].nan_to_num(), stored[1].nan_to_num()) < FP8_TOLERANCE


@pytest.mark.parametrize("lens", [LENS, LENS[:1], LENS * 20], ids=["few", "one", "many"])
@pytest.mark.parametrize("per_row", [True, False])
def test_logits(per_row: bool, lens: list[int]) -> None:
    """What DeepGEMM leaves unwritten is -inf, and a plan serves every call of its lengths."""
    call = indexer_inputs.index_logits(Draw("cuda", BF16), lens, per_row)
    assert backend.choices("indexer.index_logits", DEVICE) or not on_sm90()
    wanted = indexer.reference_logits(**call)
    plan = indexer.plan(call["lens"], per_row)
    for given in (plan, plan, None):
        assert_close(indexer.index_logits(**call, plan=given), wanted, 1e-3)


@pytest.mark.parametrize("per_row", [True, False])
def test_choice(per_row: bool) -> None:
    call = indexer_inputs.chosen_rows(Draw("cuda"), LENS, TOPK, per_row)
    found = indexer.chosen_rows(**call)
    with backend.forced(**{"indexer.chosen_rows": ""}):
        wanted = indexer.chosen_rows(**call)
    assert torch.equal(found.sort(1).values, wanted.sort(1).values)


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("keys", [1024, 4096, 16384, 65536, 131072])
def test_flashinfer_selects_the_first_of_the_largest(keys: int, rows: int, equal: bool) -> None:
    """Equal ones are more than its block has room for. What lies behind a row's keys is not read."""
    pytest.importorskip("flashinfer")
    logits = Draw("cuda")(rows, keys)
    logits = (logits > 0).float() if equal else logits
    for first in (keys, 1):
        lens = torch.tensor([first, TOPK - 1, TOPK, TOPK + 1, keys // 2 + 3, keys - 1], dtype=torch.int32)
        lens = lens.clamp(max=keys).repeat(43)[:rows].cuda()
        behind = torch.arange(keys, device=DEVICE) >= lens.unsqueeze(1)
        wanted = indexer_inputs.first_of_equals(logits, lens, TOPK)
        for _ in range(3):
            assert torch.equal(flashinfer.top_keys(logits.masked_fill(behind, torch.nan), lens, TOPK), wanted)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_attention_to_chosen_rows(heads: int, kv_dtype: torch.dtype) -> None:
    call = indexer_inputs.mla_sparse(Draw("cuda", BF16), LENS, TOPK, heads, kv_dtype)
    assert backend.choices("mla_sparse.mla_sparse", DEVICE) or not on_sm90()
    kv = call["kv"]
    widened = kv if kv_dtype == E4M3 else pool_rows(kv).float().as_strided(kv.shape, kv.stride())
    with backend.forced(**{"mla_decode.mla_decode": "", "mla_decode.plan": ""}):
        wanted = by_copies(**call | {"q": call["q"].float(), "kv": widened})
    for choice in backend.choices("mla_sparse.mla_sparse", DEVICE):
        with backend.forced(**{"mla_sparse.mla_sparse": choice.target}):
            assert_close(mla_sparse(**call), wanted, ATTENTION_TOLERANCE[BF16])


@pytest.mark.parametrize("top_keys", ["", "millrace_kernels.lib.flashinfer:top_keys"])
def test_graph_chooses_anew_for_other_lengths(top_keys: str) -> None:
    """Captured with short sequences, replayed with long ones: the plan follows the lengths on the device."""
    call = indexer_inputs.index_logits(Draw("cuda", BF16), LENS, True)
    lens, table = call["lens"].clone(), call["page_table"]

    def chosen() -> Tensor:
        logits = indexer.index_logits(**call | {"lens": lens}, plan=indexer.plan(lens, True))
        with backend.forced(**{"indexer.top_keys": top_keys}):
            return indexer.chosen_rows(logits, lens, TOPK, table, 64, 64)

    lens.fill_(1)
    graph, found = captured(chosen)
    lens.copy_(call["lens"])
    graph.replay()
    assert torch.equal(found.sort(1).values, chosen().sort(1).values)
    assert (found >= 0).sum(1).tolist() == [min(num, TOPK) for num in LENS]
