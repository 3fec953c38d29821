"""The attention ops against softmax written out per query, over poisoned pools."""

import pytest
import torch
from kernels.cases import DECODE_CASES, PREFILL_CASES, DecodeCase, PrefillCase
from millrace_kernels import mla_decode as mla_decode_module
from millrace_kernels import mla_prefill as mla_prefill_module
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.kv_gather import kv_gather
from millrace_kernels.merge_state import merge_state
from millrace_kernels.mla_absorb import absorb_q, project_v
from millrace_kernels.mla_decode import mla_decode
from millrace_kernels.mla_expand import expand_kv, rope_q
from millrace_kernels.mla_prefill import mla_prefill
from millrace_kernels.mla_qkv import kv_store, mla_qkv_norm
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.rope import rope
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.shapes import TINY
from millrace_kernels.testing.tolerances import poisoned
from millrace_testing.tolerances import ATTENTION_TOLERANCE, assert_close
from torch import Tensor

SCALE = 0.07
by_name = {"ids": lambda case: case.name}


def naive(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query [H, Dq] over its keys [n, H, Dq], in float64."""
    if not len(k):
        return torch.zeros(q.shape[0], v.shape[-1]), torch.full((q.shape[0],), -torch.inf)
    scores = torch.einsum("hd,nhd->hn", q.double(), k.double()) * SCALE
    out = torch.einsum("hn,nhv->hv", scores.softmax(-1), v.double())
    return out.float(), scores.exp().sum(-1).log().float()


def heads(num: int, dim: int, seed: int) -> Tensor:
    return torch.randn(num, TINY.heads, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", PREFILL_CASES, **by_name)
@pytest.mark.parametrize("causal", [True, False])
def test_mla_prefill(case: PrefillCase, causal: bool) -> None:
    k_lens = case.q_lens if causal else case.prefix_lens
    q = torch.cat((heads(sum(case.q_lens), 192, 1), poisoned((2, TINY.heads, 192))))  # rows past the sum are padding
    k, v = heads(sum(k_lens), 192, 2), heads(sum(k_lens), 128, 3)
    out, lse = mla_prefill(q, k, v, case.q_lens, k_lens, SCALE, causal)
    expected_out, expected_lse = torch.zeros(out.shape), torch.full(lse.shape, -torch.inf)
    q_start = k_start = 0
    for q_len, k_len in zip(case.q_lens, k_lens, strict=True):
        for i in range(q_len):
            keys = slice(k_start, k_start + (i + 1 if causal else k_len))
            expected_out[q_start + i], expected_lse[q_start + i] = naive(q[q_start + i], k[keys], v[keys])
        q_start, k_start = q_start + q_len, k_start + k_len
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("case", DECODE_CASES, **by_name)
def test_mla_decode(case: DecodeCase) -> None:
    generator = torch.Generator().manual_seed(0)
    kv, table = attention_inputs.paged(Draw(), case.seq_lens, torch.float32)
    q = torch.randn(len(case.seq_lens), case.num_queries, TINY.heads, TINY.kv_row, generator=generator)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    out, lse = mla_decode(q, kv, table, lens, SCALE, TINY.latent)
    expected_out, expected_lse = torch.zeros(out.shape), torch.full(lse.shape, -torch.inf)
    for b, num in enumerate(case.seq_lens):
        rows = torch.cat([kv[page] for page in table[b].tolist()])[:num].unsqueeze(1).expand(-1, TINY.heads, -1)
        for s in range(case.num_queries):
            seen = rows[: max(num - case.num_queries + s + 1, 0)]
            expected_out[b, s], expected_lse[b, s] = naive(q[b, s], seen, seen[..., : TINY.latent])
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


def test_mla_decode_reads_a_bf16_pool() -> None:
    generator = torch.Generator().manual_seed(0)
    kv, table = attention_inputs.paged(Draw(), (100,), torch.float32)
    q = torch.randn(1, 1, TINY.heads, TINY.kv_row, generator=generator)
    lens = torch.tensor([100], dtype=torch.int32)
    rounded = kv.bfloat16()
    out, _ = mla_decode(q, rounded, table, lens, SCALE, TINY.latent)
    expected, _ = mla_decode(q, rounded.float(), table, lens, SCALE, TINY.latent)
    assert_close(out, expected)


@pytest.mark.parametrize(
    ("starts", "lens"),
    [((), ()), ((0, 64, 0), (65, 0, 3)), ((64, 0, 128), (36, 129, 1)), ((0, 0, 0), (0, 0, 0))],
)
def test_kv_gather(starts: tuple[int, ...], lens: tuple[int, ...]) -> None:
    seq_lens = (100, 129, 200)[: len(starts)]
    kv, table = attention_inputs.paged(Draw(), seq_lens, torch.float32)
    expected = [
        kv[table[b, i // 64], i % 64] for b in range(len(starts)) for i in range(starts[b], starts[b] + lens[b])
    ]
    rows = kv_gather(kv, table, starts, lens)
    assert torch.equal(rows, torch.stack(expected) if expected else torch.zeros(0, TINY.kv_row))


@pytest.mark.parametrize("num", [0, 1, 7, 64, 128])
def test_kv_store_writes_its_slots_and_nothing_else(num: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = poisoned((5, 3, 64, TINY.kv_row))
    slots = torch.randperm(4 * 64, generator=generator)[:num] + 64
    rows = torch.randn(num, TINY.kv_row, generator=generator)
    kv_store(pool[:, 1], slots, rows[:, : TINY.latent], rows[:, TINY.latent :])
    assert torch.equal(pool[slots // 64, 1, slots % 64], rows)
    pool[slots // 64, 1, slots % 64] = torch.nan
    assert pool.isnan().all()


def test_kv_store_rounds_to_the_pool() -> None:
    pool = torch.zeros(2, 1, 64, TINY.kv_row, dtype=torch.bfloat16)
    rows = torch.randn(2, TINY.kv_row)
    kv_store(pool[:, 0], torch.tensor([3, 64]), rows[:, : TINY.latent], rows[:, TINY.latent :])
    assert torch.equal(pool[[0, 1], 0, [3, 0]], rows.bfloat16())


@pytest.mark.parametrize("num", [0, 1, 7, 64])
def test_merge_state_equals_attention_over_both_sets(num: int) -> None:
    q, k, v = heads(num, 192, 1), heads(30, 192, 2), heads(30, 128, 3)
    lens = (num,)
    whole = mla_prefill(q, k, v, lens, (30,), SCALE, causal=False)
    left = mla_prefill(q, k[:11], v[:11], lens, (11,), SCALE, causal=False)
    right = mla_prefill(q, k[11:], v[11:], lens, (19,), SCALE, causal=False)
    nothing = mla_prefill(q, k[:0], v[:0], lens, (0,), SCALE, causal=False)
    for merged in (merge_state(*left, *right), merge_state(*whole, *nothing), merge_state(*nothing, *whole)):
        assert_close(merged[0], whole[0])
        assert_close(merged[1], whole[1])
    out, lse = merge_state(*nothing, *nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("num", [0, 1, 20])
@pytest.mark.parametrize("normed", [True, False])
def test_mla_qkv_norm_is_two_norms_a_rotation_and_a_store(num: int, normed: bool) -> None:
    call = attention_inputs.mla_qkv_norm(Draw(), num, 256, normed, torch.float32)
    q, c_kv, k_pe = mla_qkv_norm(**call)
    parts = call["qkv"].split((256, TINY.latent, TINY.rope), dim=1)
    if normed:
        assert_close(q.plain, rms_norm(parts[0], None, call["q_weight"], call["eps"])[0].plain)
        assert (q.fp8 is not None) == (num > SMALL_TOKENS)
    else:
        assert torch.equal(q.plain, parts[0]) and q.fp8 is None
    assert_close(c_kv, rms_norm(parts[1], None, call["kv_weight"], call["eps"])[0].plain)
    assert_close(k_pe, rope(parts[2], call["cos"], call["sin"]))
    pages, rows = call["slots"] // TINY.page, call["slots"] % TINY.page
    assert torch.equal(call["kv"][pages, rows], torch.cat((c_kv, k_pe), dim=1))
    call["kv"][pages, rows] = torch.nan
    assert call["kv"].isnan().all()


@pytest.mark.parametrize("num", [1, 7, 70])
def test_absorbed_attention_equals_expanded_attention(num: int) -> None:
    draw = Draw()
    q, c_kv, k_pe = draw(num, TINY.heads, 192), draw(num, TINY.latent), draw(num, TINY.rope)
    w_uk, w_uv = draw(2, TINY.heads, 128, TINY.latent) / TINY.latent**0.5
    angles = draw.angles(num)

    up = torch.einsum("tc,hnc->thn", c_kv, torch.cat((w_uk, w_uv), dim=1))
    k, v = expand_kv(up, k_pe, TINY.nope)
    expected, _ = mla_prefill(rope_q(q.clone(), **angles), k, v, (num,), (num,), SCALE, causal=True)

    kv, table = attention_inputs.paged(draw, (num,), torch.float32)
    kv_store(kv, table[0].repeat_interleave(TINY.page)[:num] * TINY.page + torch.arange(num) % TINY.page, c_kv, k_pe)
    absorbed = absorb_q(q, w_uk, **angles).unsqueeze(0)  # one sequence, all of it queries
    latent, _ = mla_decode(absorbed, kv, table, torch.tensor([num], dtype=torch.int32), SCALE, TINY.latent)
    assert_close(project_v(latent[0], w_uv), expected.flatten(1), ATTENTION_TOLERANCE[torch.float32])


def test_fp8_pool_saturates_and_reads_as_what_it_holds() -> None:
    draw, lens = Draw(), (70, 5)
    kv, table = attention_inputs.paged(draw, lens, torch.float8_e4m3fn)
    row, large = draw(1, TINY.kv_row), 1e4
    row[0, 0], row[0, -1] = large, -large
    kv_store(kv, table[0, :1].long() * TINY.page, row[:, : TINY.latent], row[:, TINY.latent :])
    stored = kv[table[0, 0], 0].float()
    assert stored[0] == 448 and stored[-1] == -448
    assert_close(stored[1:-1], row[0, 1:-1], 2**-4)

    q, seq_lens = draw(2, 1, TINY.heads, TINY.kv_row), torch.tensor(lens, dtype=torch.int32)
    out, lse = mla_decode(q, kv, table, seq_lens, SCALE, TINY.latent)
    wanted = mla_decode(q, kv.float(), table, seq_lens, SCALE, TINY.latent)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    rows = kv_gather(kv, table, (0, 0), lens)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows.float(), kv_gather(kv.float(), table, (0, 0), lens))


def test_references_need_no_plan() -> None:
    assert mla_decode_module.plan(torch.ones(1, dtype=torch.int32), 1, 2, torch.float32) is None
    heads = mla_prefill_module.Heads(2, 192, 128)
    assert mla_prefill_module.plan((1,), (1,), heads, True, torch.device("cpu"), torch.float32) is None
