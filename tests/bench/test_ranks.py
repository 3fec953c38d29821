"""The bench of ranks that compute together, on a CPU and small widths; its timing needs GPUs."""

import argparse

import pytest
from millrace_bench import ranks
from torch.multiprocessing import ProcessExitedException


def test_the_share_of_communication() -> None:
    size = {"kind": "decode", "count": 2, "length": 100, "kv_dtype": "bfloat16"}
    rows = [{**size, "exchange": "none", "ms": 3.0}, {**size, "exchange": "gather", "ms": 4.0}]
    rows.append({**size, "length": 200, "exchange": "gather", "ms": 4.0})
    ranks.shares(rows)
    assert [row.get("communication") for row in rows] == [0.0, 0.25, None]


def arguments(**changes: object) -> argparse.Namespace:
    sizes = {"decode": ["2x100"], "prefill": ["2x70"], "kv_dtype": ["bfloat16"]}
    rest = {"ranks": 2, "experts": 16, "layers": 2, "tiny": True, "repeats": 2, "profile": False, "shard": "tiny"}
    return argparse.Namespace(**{**sizes, **rest, "limit_s": 100.0, **changes})


@pytest.mark.long
def test_a_row_that_takes_too_long_says_where_the_ranks_are(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProcessExitedException):
        ranks.run("gather", arguments(limit_s=3.0, repeats=10_000_000))  # the other rank may come a second later
    err = capfd.readouterr().err
    assert "Timeout (0:00:03" in err and "in measure" in err
