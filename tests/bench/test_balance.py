"""The bench of expert load balancing."""

import numpy as np
from millrace_bench import balance


def test_skewed_loads_become_even() -> None:
    rng = np.random.default_rng(0)
    shares = balance.power_law(1.0, rng)[:2]
    row = balance.compare("power law", shares * 1e6, shares, ranks=8, spare=1, rows=16)
    assert row["slots"] == 33 and row["window_before"] > 1.5 > 1.1 > row["window_after"] >= 1
    assert row["step_before"] > row["step_after"] > 1 and 0 < row["moved"] < 0.6


def test_more_ranks_than_divide_the_experts() -> None:
    shares = np.full((1, 256), 1 / 256)
    assert balance.compare("even", shares, shares, ranks=72, spare=0, rows=1)["slots"] == 4


def test_the_trained_checkpoint_is_counted() -> None:
    found = balance.trace(("Rows are counted.",))
    tokens = found.sum(axis=1) // 2
    assert found.shape == (3, 8) and tokens[0] > 4 and tokens[0] == tokens[1] >= tokens[2] >= 1
