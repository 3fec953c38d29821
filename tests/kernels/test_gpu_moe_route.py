"""Routes on a GPU: few tokens in one launch, against the two of many tokens, over the widths of DeepSeek-V3's ranks."""

import pytest
import torch
from millrace_kernels.testing.expert_inputs import choose, held_ids
from millrace_kernels.testing.shapes import V3_TP8
from millrace_kernels.triton import moe_route

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
RANKS = [(257, 0, 256, True), (32, 96, 256, False), (33, 0, 32, True)]  # held, first, of so many, shared; folded last


@pytest.mark.parametrize("num", [1, 17, 128, 200, 256])
@pytest.mark.parametrize(("held", "first", "total", "shared"), RANKS)
def test_few_tokens_go_where_many_would(
    num: int, held: int, first: int, total: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator(device=CUDA).manual_seed(num)
    _, experts = choose(num, V3_TP8, CUDA, generator)
    experts = experts % total
    experts[3:4] = -1
    experts = held_ids(experts, first, held - shared)
    scales = torch.rand(56, num, generator=generator, device=CUDA).t()

    def route() -> tuple[moe_route.ExpertRoute, moe_route.Blocks]:
        return moe_route.route(experts, held, shared, 32, scales)

    (plan, blocks), (again, blocks_again) = route(), route()
    monkeypatch.setattr(moe_route, "FEW_TOKENS", 0)
    other, other_blocks = route()
    for name in ("ends", "total"):
        assert torch.equal(getattr(plan, name), getattr(other, name)), name
    assert torch.equal(plan.rows, again.rows) and torch.equal(plan.rows < 0, other.rows < 0)
    used = torch.arange(int(plan.total) // 32, device=CUDA)
    assert torch.equal(blocks.experts[used], other_blocks.experts[used])
    counts = [int((experts == expert).any(1).sum()) for expert in range(held - shared)] + [num] * shared
    for count, end in zip(counts, plan.ends.tolist(), strict=True):
        tokens = blocks.tokens[end - count : end]
        assert torch.equal(tokens, other_blocks.tokens[end - count : end].sort().values)
        assert torch.equal(tokens, blocks_again.tokens[end - count : end])
        assert torch.equal(blocks.scales[:, end - count : end], scales[tokens].t())
    tokens = torch.arange(num, device=CUDA)[:, None].expand_as(plan.rows)[plan.rows >= 0]
    assert torch.equal(blocks.tokens[plan.rows[plan.rows >= 0]], tokens.int())
