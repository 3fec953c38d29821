"""Recorded loads: what is sent of them, and what is said about bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_load.traces import (
    BLOCK,
    Exchange,
    Recorded,
    plan_mooncake,
    plan_sharegpt,
    read_mooncake,
    read_sharegpt,
)
from millrace_load.workload import Distribution, WorkloadError
from millrace_testing.examples import examples

ROW = {"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 2353]}
NO_TIME = Distribution.times("0")


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def talk(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": sender, "value": value} for sender, value in messages]}


def test_mooncake_rows_are_read(tmp_path: Path) -> None:
    later = {**ROW, "timestamp": 30535}
    path = lines(tmp_path / "t.jsonl", ROW, "", later, later)
    assert read_mooncake(path, 2) == [
        Recorded(27482, 1030, 52, (46, 47, 2353)),
        Recorded(30535, 1030, 52, (46, 47, 2353)),
    ]
    assert len(read_mooncake(path, 100)) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "no JSON"),
        ([1], "no JSON object"),
        ({**ROW, "timestamp": -1}, "timestamp must be an integer of at least 27482, not -1"),
        ({**ROW, "timestamp": 3}, "timestamp must be an integer of at least 27482, not 3"),
        ({**ROW, "input_length": "many"}, 'input_length must be an integer of at least 1, not "many"'),
        ({**ROW, "output_length": 0}, "output_length must be an integer of at least 1, not 0"),
        ({**ROW, "output_length": True}, "output_length must be an integer of at least 1, not true"),
        ({key: ROW[key] for key in ROW if key != "hash_ids"}, "hash_ids must be a list of integers"),
        ({**ROW, "hash_ids": [1, 2, "3"]}, "hash_ids must be a list of integers"),
        ({**ROW, "hash_ids": [1, 2]}, "hash_ids must have 3 ids for input_length 1030, not 2"),
    ],
)
def test_bad_mooncake_lines_are_named(tmp_path: Path, bad: Any, message: str) -> None:
    path = lines(tmp_path / "t.jsonl", ROW, "", bad)
    with pytest.raises(WorkloadError) as caught:
        read_mooncake(path, 100)
    assert str(caught.value).startswith(f"{path}:3: {message}")


def test_files_that_have_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_mooncake(tmp_path / "none", 1)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(WorkloadError, match="binary:1: no JSON"):
        read_mooncake(tmp_path / "binary", 1)
    with pytest.raises(WorkloadError, match="no requests"):
        read_mooncake(lines(tmp_path / "empty"), 1)
    with pytest.raises(WorkloadError, match="no conversation has"):
        read_sharegpt(lines(tmp_path / "unasked", [talk(("gpt", "yes"))]), 1, 1)


SHAPES = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(8, BLOCK))


@examples(40)
@given(SHAPES, SHAPES)
def test_prompts_share_what_their_ids_share(one: tuple[list[int], int], other: tuple[list[int], int]) -> None:
    rows = [Recorded(0, BLOCK * (len(ids) - 1) + rest, 1, tuple(ids)) for ids, rest in (one, other)]
    first, second = (item.turns[0].said for item in plan_mooncake(rows, 1.0, 1000, 10**6, seed=0).conversations)
    assert [len(first), len(second)] == [row.input_length for row in rows]
    for block, (mine, its) in enumerate(zip(one[0], other[0], strict=False)):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, len(first), len(second))
        assert (first[begin:end] == second[begin:end]) == (mine == its)


def test_another_seed_gives_other_tokens() -> None:
    rows = [Recorded(0, 600, 1, (1, 2))]
    (one,), (same,), (other,) = (plan_mooncake(rows, 1.0, 1000, 4096, seed).conversations for seed in (0, 0, 1))
    assert one.turns == same.turns and one.turns[0].said != other.turns[0].said


def test_mooncake_is_replayed_from_its_first_request_with_a_speed() -> None:
    rows = [Recorded(at, 10, 3, (0,)) for at in (5000, 5000, 8000)]
    plan = plan_mooncake(rows, 2.0, 100, 4096, seed=0)
    assert [item.start_s for item in plan.conversations] == [0.0, 0.0, 1.5]
    assert [item.turns[0].max_tokens for item in plan.conversations] == [3, 3, 3]


def test_requests_longer_than_the_context_are_left_out() -> None:
    rows = [Recorded(0, 90, 11, (0,)), Recorded(1, 90, 10, (0,))]
    plan = plan_mooncake(rows, 1.0, 100, 100, seed=0)
    assert (plan.num_requests, plan.left_out) == (1, 1) and plan.conversations[0].start_s == 0.001
    with pytest.raises(WorkloadError, match="no recorded request fits into the model's context of 50"):
        plan_mooncake(rows, 1.0, 100, 50, seed=0)


def test_without_a_vocabulary_blocks_are_words() -> None:
    (item,) = plan_mooncake([Recorded(0, 520, 1, (3, 4))], 1.0, 0, 4096, seed=0).conversations
    assert isinstance(item.turns[0].said, str) and len(item.turns[0].said.split()) == 520


def test_sharegpt_takes_exchanges_until_nobody_answers(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "s.json",
        [
            talk(("system", "be kind"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e")),
            talk(("gpt", "only an answer")),
            talk(("human", "f"), ("human", "g"), ("gpt", "h")),
            talk(("human", "i"), ("gpt", " ")),
            talk(("human", "half \ud83d"), ("gpt", "j"), ("gpt", "k")),
        ],
    )
    two = [Exchange("a", "b"), Exchange("c", "d")]
    half = [Exchange("half ?", "j")]
    assert read_sharegpt(path, 100, 9) == [two, half]
    assert read_sharegpt(path, 100, 1) == [two[:1], half]
    assert read_sharegpt(path, 1, 9) == [two]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ("[\n{]", ":2: no JSON"),
        ({"conversations": []}, ": not a list of conversations"),
        ([talk(("human", "a"), ("gpt", "b")), {}], ": [1].conversations must be a list"),
        ([{"conversations": [{"from": "human"}]}], ": [0].conversations[0].value must be a string, not null"),
        ([{"conversations": [{"from": 3, "value": "a"}]}], ": [0].conversations[0].from must be a string, not 3"),
        ([{"conversations": ["hello"]}], ": [0].conversations[0].from must be a string, not null"),
    ],
)
def test_bad_sharegpt_fields_are_named(tmp_path: Path, records: Any, message: str) -> None:
    path = lines(tmp_path / "s.json", records)
    with pytest.raises(WorkloadError) as caught:
        read_sharegpt(path, 100, 9)
    assert str(caught.value).startswith(f"{path}{message}")


def test_sharegpt_conversations_end_at_the_context() -> None:
    talks = [[Exchange("a", "b"), Exchange("c", "d")], [Exchange("long", "b")]]
    num_tokens = {"a": 10, "b": 5, "c": 20, "d": 6, "long": 90}
    plan = plan_sharegpt(talks, num_tokens, Distribution.times("2"), 41, seed=0)
    (item,) = plan.conversations
    assert [(turn.said, turn.max_tokens, turn.think_s) for turn in item.turns] == [("a", 5, 0.0), ("c", 6, 2.0)]
    assert plan.left_out == 1 and item.start_s is None
    (shorter,) = plan_sharegpt(talks, num_tokens, NO_TIME, 40, seed=0).conversations
    assert len(shorter.turns) == 1
    with pytest.raises(WorkloadError, match="context of 14 tokens"):
        plan_sharegpt(talks, num_tokens, NO_TIME, 14, seed=0)
