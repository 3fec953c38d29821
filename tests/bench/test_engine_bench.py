"""Benches of an engine with a model: its rows on a CPU, and how numbers of drafts compare."""

import weakref
from typing import Any

import pytest
from millrace_bench import engine, engine_compare, engine_model
from millrace_serve.engine.start.torch_factory import Rank

SHARD = ["--shard", "tp8", "--tiny", "--layers", "2", "--prefill-tokens", "16", "--set", "graphs=on"]


def decode(batch: int, drafts: int, tokens_per_s: float) -> dict[str, object]:
    accept = 1.0 + drafts / 2
    step_ms = batch * accept / tokens_per_s * 1e3
    return {"kind": "decode", "batch": batch, "drafts": drafts, "accept": accept, "step_ms": step_ms}


ROWS = [decode(1, 0, 100.0), decode(8, 0, 400.0), decode(1, 1, 150.0), decode(8, 1, 300.0)]


def test_ratios_are_to_the_first_engine() -> None:
    assert engine_compare.ratios(ROWS) == [
        {"kind": "ratio", "batch": 1, "drafts": 1, "speedup": 1.5},
        {"kind": "ratio", "batch": 8, "drafts": 1, "speedup": 0.75},
    ]


def test_what_was_drawn_does_not_decide() -> None:
    lucky = {"kind": "decode", "batch": 1, "drafts": 1, "accept": 2.0, "expected": 1.5, "step_ms": 15.0}
    assert engine_compare.ratios([ROWS[0], lucky])[0]["speedup"] == 1.0
    assert engine_compare.best([ROWS[0], lucky])[0]["drafts"] == 0


def test_the_best_number_by_batch() -> None:
    first, second, limits = engine_compare.best(ROWS)
    assert (first["batch"], first["drafts"], first["speedup"]) == (1, 1, 1.5)
    assert (second["batch"], second["drafts"], second["speedup"]) == (8, 0, 1.0)
    assert limits == {"kind": "draft_batches", "most": [1]}


@pytest.mark.parametrize(
    ("best_of", "most"),
    [({1: 3, 2: 2, 4: 1, 8: 0}, [4, 2, 1]), ({1: 0, 2: 1}, [0]), ({1: 2, 4: 1, 8: 2}, [8, 1]), ({1: 0}, [])],
)
def test_limits_end_before_the_first_batch_that_wants_fewer(best_of: dict[int, int], most: list[int]) -> None:
    assert engine_compare.draft_batches(best_of) == most


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Of the engines that were loaded."""
    found: list[weakref.ref[Any]] = []
    load = engine_model.load_rank

    def load_rank(*args: Any, **options: Any) -> Rank:
        rank = load(*args, **options)
        found.append(weakref.ref(rank.runner))
        return rank

    monkeypatch.setattr(engine_model, "load_rank", load_rank)
    return found


def test_decoding_starts_behind_a_context_that_nobody_computed(runners: list[weakref.ref[Any]]) -> None:
    args = engine.parser().parse_args([*SHARD, "--batches", "1", "3", "--context", "100", "--outputs", "8"])
    rows = list(engine.run_model(args))
    assert [(row["kind"], row.get("batch")) for row in rows] == [("start", None), ("decode", 1), ("decode", 3)]
    for row in rows[1:]:
        assert row["prompt"] == 100 and row["accept"] == 1.0 and row["exact"]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_ms"] * 1e3, rel=1e-2, abs=0.05)
    assert [runner() for runner in runners] == [None], "the next engine needs its memory"


def test_drafts_are_compared_on_the_same_weights(runners: list[weakref.ref[Any]]) -> None:
    options = ["--batches", "2", "--context", "20", "--outputs", "12", "--drafts", "0", "2"]
    options += ["--acceptance", "1", "1", "0"]
    rows = list(engine.run_model(engine.parser().parse_args([*SHARD, *options])))
    none, two = (row for row in rows if row["kind"] == "decode")
    assert (none["drafts"], none["accept"], two["drafts"], two["accept"]) == (0, 1.0, 2, 3.0) and two["exact"]
    assert [row["kind"] for row in rows[4:]] == ["ratio", "best", "draft_batches"]
    rounded = 1e-3 + sum(0.05 / row["tokens_per_s"] for row in (none, two))  # much of a few tokens per second
    assert rows[4]["speedup"] == pytest.approx(two["tokens_per_s"] / none["tokens_per_s"], rel=rounded)
    assert [runner() for runner in runners] == [None, None]
