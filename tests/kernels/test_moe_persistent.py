"""The persistent kernel of the experts, through Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch
from millrace_kernels.fp8 import Operand, quant_groups
from millrace_kernels.ref import moe_experts as ref_experts
from millrace_kernels.testing.experts import draw_experts
from millrace_kernels.testing.numeric import FP8_EXPERTS_TOLERANCE, assert_close
from millrace_kernels.triton import moe_grouped, moe_persistent
from millrace_kernels.triton.moe_grouped import Config, Launch
from millrace_testing.poison import poison_empty

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in padding rows

DIM, SIZE, HELD, FIRST = 512, 256, 4, 2
ONE, TWO, PLAIN = Launch(4, 3, programs=1), Launch(4, 3, 256, programs=1), Launch(4, 3)
CONFIGS = [Config(32, ONE, ONE), Config(32, ONE, TWO), Config(64, PLAIN, TWO), Config(64, ONE, PLAIN)]


def run(num: int, shared: bool, config: Config, first: int = FIRST) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels and the reference make of tokens of which some name an expert twice, some none."""
    generator = torch.Generator().manual_seed(num)
    x, weights = torch.randn(num, DIM, generator=generator).bfloat16(), torch.rand(num, 3, generator=generator)
    experts = torch.randint(-1, 9, (num, 3), generator=generator, dtype=torch.int32)
    experts[1:2], experts[2:3, :2] = -1, 4
    held = HELD + shared
    w13, w2 = draw_experts(held, DIM, SIZE, torch.bfloat16, True, x.device, generator)
    arguments = (weights, experts, w13, w2, first)
    expected = ref_experts.moe_experts(x, *arguments, shared_expert=shared)
    out = moe_grouped.run(Operand(None, quant_groups(x)), *arguments, shared_expert=shared, config=config)
    return out, expected


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("num", "shared", "sms"), [(1, False, 1000), (40, True, 1), (40, True, 5)])
def test_programs_walk_over_all_tiles(
    num: int, shared: bool, sms: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts with a part of a block, and of a shared one with more than one; also fewer tiles than programs."""
    monkeypatch.setattr(moe_persistent, "sms", lambda: sms)
    poison_empty(monkeypatch)
    assert_close(*run(num, shared, config), FP8_EXPERTS_TOLERANCE)


def test_nobody_chose_an_expert_held_here() -> None:
    out, _ = run(3, False, CONFIGS[0], first=100)
    assert not out.any()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(16, ONE, ONE), "block_m 16: the persistent kernel takes 32 rows or more"),
        (Config(32, ONE, Launch(4, 3, 64, programs=1)), "block_n 64: 128 or 256"),
    ],
)
def test_tiles_that_cannot_be_read_are_refused(config: Config, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(1, False, config)
