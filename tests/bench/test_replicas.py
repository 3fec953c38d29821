"""The bench of replicas that step together, on a CPU and small widths; its timing needs GPUs."""

from millrace_bench import replicas
from millrace_bench.replicas import Engines


def test_a_row_is_that_of_the_slowest_replica() -> None:
    rows = [{"kind": "decode", "count": 8, "length": 99, "ms": ms, "accept": accept} for ms, accept in ((4, 2), (5, 1))]
    found = replicas.merged(rows, Engines("peer", 1, 0))
    assert (found["ms"], found["accept"], found["tokens_per_s"]) == (5, 1.5, 2 * 8 * 1.5 / 5e-3)
    prefill = replicas.merged([{**rows[0], "kind": "prefill"}], Engines("peer", 1, 0))
    assert prefill["tokens_per_s"] == 8 * 99 / 4e-3


def test_engines_have_room_for_every_size() -> None:
    args = replicas.parser().parse_args(["--decode", "8x100", "2x900", "--prefill", "3x500", "--steps", "10"])
    limits = Engines("peer", 1, 0).limits(args)
    assert limits.max_running == 8 and limits.max_prefill_tokens == 1500
    assert limits.max_model_len == 900 + replicas.outputs(Engines("peer", 1, 0), args)
    assert replicas.outputs(Engines("peer", 1, 1), args) > 2 * replicas.ROUNDS * replicas.INTERVAL
