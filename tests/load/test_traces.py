"""Recorded loads: what is sent of them, and what is said about bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_load.replay import BLOCK, Blocks, Recorded, Replay, Session
from millrace_load.traces import read_sharegpt, read_trace
from millrace_load.workload import Branch, Conversation, Distribution, WorkloadError
from millrace_testing.examples import examples

ROW = {"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 2353]}
LATER = {"session_id": "s", "delay": 1736.5, "input_length": 700, "output_length": 9, "hash_ids": [70, 71]}
NO_TIME = Distribution.times("0")


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def dag(name: str, *turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = [{"messages": [{"role": "user", "content": f"{name}{i}"}], "max_tokens": 5} for i in range(len(turns))]
    return {"session_id": name, "turns": [text | turn for text, turn in zip(said, turns, strict=True)], **more}


def talk(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": sender, "value": value} for sender, value in messages]}


def replay(*sessions: Session, context: int = 10**6, vocab: int = 100, speed: float = 1.0, seed: int = 0) -> Any:
    return Replay({}, vocab, NO_TIME, context, seed, speed).plan(sessions)


def blocks(ids: list[int], length: int, answer: int = 1, delay_s: float = 0.0) -> Recorded:
    return Recorded(Blocks(ids, length), answer, delay_s)


def test_mooncake_rows_are_conversations_in_the_order_of_their_times(tmp_path: Path) -> None:
    first = {**LATER, "timestamp": 30482.5, "delay": 0, "group_id": 7}
    path = lines(tmp_path / "t.jsonl", {**ROW, "timestamp": 30482}, first, "", LATER, ROW)
    alone = [blocks([46, 47, 2353], 1030, 52)]
    agent = Session([blocks([70, 71], 700, 9), blocks([70, 71], 700, 9, 1.7365)], 3.0005)
    assert read_trace(path, 100) == [Session(alone, 0.0), Session(alone, 3.0), agent]
    assert read_trace(path, 2) == [Session(alone, 0.0), agent._replace(start_s=0.0005)]
    timeless = {key: value for key, value in ROW.items() if key != "timestamp"}
    assert read_trace(lines(path, timeless), 2) == [Session(alone)], "when a client is free"


BAD_ROWS = [
    ("{", "no JSON"),
    ([1], "Input should be an object"),
    ({**ROW, "timestamp": -1}, "timestamp: Input should be greater than or equal to 0, not -1"),
    ({**ROW, "timestamp": float("nan")}, "timestamp: Input should be a finite number, not NaN"),
    ({**ROW, "output_length": 0}, "output_length: Input should be greater than or equal to 1, not 0"),
    ({**ROW, "hash_ids": [1, 2, "3"]}, 'hash_ids.2: Input should be a valid integer, not "3"'),
    ({**ROW, "hash_ids": [1, 2]}, "hash_ids must have 3 ids for input_length 1030, not 2"),
    ({**ROW, "session_id": "r"}, "timestamp: later turns of a session have a delay"),
]
NAMELESS = dag("c", {})
del NAMELESS["session_id"]
BAD_DAGS = [
    (NAMELESS, "session_id: Field required"),
    (dag("c"), "turns: List should have at least 1 item"),
    (dag("c", {"messages": []}), "turns.0.messages: List should have at least 1 item"),
    (dag("c", {"messages": [{"content": 5}]}), "turns.0.messages.0.content: Input should be a valid string, not 5"),
    (dag("c", {"forks": ["r"]}, {}), "turns.0.forks ends the conversation, which has more turns"),
    (dag("c", {"spawns": [{"children": ["r"], "join_at": 0}]}, {}), "turns.0.spawns: join_at must be a later turn"),
    (dag("c", {"spawns": ["x"]}), "session_id 'x' is in no line"),
    (dag("c", {"spawns": ["c"]}), "session_id 'c' is a branch of itself"),
    (dag("r", {}), "session_id 'r' is in another line, too"),
    (dag("c", {}, orchestrator=True), "orchestrator: Input should be False, not true"),
]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [*((ROW | {"session_id": "r"}, *case) for case in BAD_ROWS), *((dag("r", {}), *case) for case in BAD_DAGS)],
)
def test_bad_lines_are_named(tmp_path: Path, good: Any, bad: Any, message: str) -> None:
    path = lines(tmp_path / "t.jsonl", good, "", bad)
    with pytest.raises(WorkloadError) as caught:
        read_trace(path, 100)
    told = str(caught.value)
    assert told.startswith((f"{path}:3: {message}", f"{path}:1: {message}")) and "\n" not in told
    assert ":3: " in told or "in another line" in message


ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ANY |= st.lists(ANY, max_size=3) | st.dictionaries(st.text(max_size=3), ANY, max_size=3)


@examples(60)
@given(st.data())
def test_any_value_of_a_field_is_read_or_refused_with_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    row = dict(data.draw(st.sampled_from([ROW, LATER, dag("c", {}, {}), dag("c", {}, pre_session_spawns=[])])))
    field = data.draw(st.sampled_from(sorted(row)))
    row[field] = data.draw(ANY)
    path = lines(tmp_path_factory.getbasetemp() / "any.jsonl", row)
    try:
        assert len(read_trace(path, 9)) == 1
    except WorkloadError as error:
        assert str(error).startswith(f"{path}:1: ") and ("turns" in row or field in str(error))


def test_files_that_have_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "none", 1)
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(WorkloadError, match="binary:1: no JSON"):
        read_trace(tmp_path / "binary", 1)
    with pytest.raises(WorkloadError, match="no requests"):
        read_trace(lines(tmp_path / "empty"), 1)
    with pytest.raises(WorkloadError, match="no conversation has"):
        read_sharegpt(lines(tmp_path / "unasked", [talk(("gpt", "yes"))]), 1, 1)


def test_branches_begin_where_a_dag_says(tmp_path: Path) -> None:
    spawns = ["one", {"children": ["two", "one"], "join_at": 2}]
    root = dag("root", {"spawns": spawns, "delay": 500}, {"forks": [{"child": "fork", "background": True}]}, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fork = dag("fork", {"messages": [{"role": "tool", "content": parts}, {"content": None}], "forks": ["one"]})
    path = lines(tmp_path / "d.jsonl", dag("one", {}), root | {"pre_session_spawns": ["two"]}, fork, dag("two", {}))
    (session,) = read_trace(path, 9)
    counts = {turn.said: 1 for turn in session.everything()}
    (found,) = Replay(counts, 100, NO_TIME, 1000, 0, speed=2.0).plan([session]).conversations

    def shape(branches: tuple[Branch, ...]) -> list[tuple[str, bool, int | None]]:
        return [(item.conversation.turns[0].said, item.inherits, item.join_at) for item in branches]

    assert [turn.said for turn in found.turns] == ["root0", "\nroot1", "\nroot2"] and found.num_requests == 9
    assert [turn.think_s for turn in found.turns] == [0.25, 0.0, 0.0] and found.start_s is None
    assert shape(found.branches) == [("two0", False, None)]
    assert shape(found.turns[0].branches) == [("one0", False, 1), ("two0", False, 2), ("one0", False, 2)]
    assert shape(found.turns[1].branches) == [("ab\n", True, None)]
    assert shape(found.turns[1].branches[0].conversation.turns[0].branches) == [("one0", True, None)]
    (short,) = Replay(counts, 100, NO_TIME, 12, 0).plan([session]).conversations
    assert len(short.turns) == 2 and not short.turns[1].branches, "a fork has the room that is left, a spawn all of it"


SHAPES = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(8, BLOCK))


@examples(40)
@given(SHAPES, SHAPES)
def test_prompts_share_what_their_ids_share(one: tuple[list[int], int], other: tuple[list[int], int]) -> None:
    turns = [blocks(ids, BLOCK * (len(ids) - 1) + rest) for ids, rest in (one, other)]
    plan = replay(*(Session([turn]) for turn in turns), vocab=1000)
    first, second = (item.turns[0].said for item in plan.conversations)
    assert [len(first), len(second)] == [turn.said.length for turn in turns if isinstance(turn.said, Blocks)]
    for block, (mine, its) in enumerate(zip(one[0], other[0], strict=False)):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, len(first), len(second))
        assert (first[begin:end] == second[begin:end]) == (mine == its)


def test_another_seed_gives_other_tokens() -> None:
    session = Session([blocks([1, 2], 600)])
    (one,), (same,), (other,) = (replay(session, seed=seed).conversations for seed in (0, 0, 1))
    assert one.turns == same.turns and one.turns[0].said != other.turns[0].said


def test_times_are_divided_by_the_speed() -> None:
    plan = replay(Session([blocks([0], 10, 3), blocks([1], 10, 3, 4.0)], 3.0), speed=2.0)
    (item,) = plan.conversations
    assert item.start_s == 1.5 and [(turn.max_tokens, turn.think_s) for turn in item.turns] == [(3, 0.0), (3, 2.0)]


def test_conversations_end_at_the_context() -> None:
    sessions = Session([blocks([0], 90, 11)]), Session([blocks([0], 50, 10), blocks([0], 30, 10), blocks([0], 1)])
    plan = replay(*sessions, context=100)
    assert (plan.num_requests, plan.left_out) == (2, 2)
    with pytest.raises(WorkloadError, match="no recorded request fits into the model's context of 50"):
        replay(*sessions, context=50)


def test_without_a_vocabulary_blocks_are_words() -> None:
    item: Conversation
    (item,) = replay(Session([blocks([3, 4], 520), blocks([5], 8)]), vocab=0).conversations
    said, later = (str(turn.said) for turn in item.turns)
    assert len(said.split()) == 520 and later.startswith(" ") and len(later.split()) == 8


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
    two, half = [Recorded("a", "b"), Recorded("c", "d", None)], [Recorded("half ?", "j")]
    assert read_sharegpt(path, 100, 9) == [Session(two), Session(half)]
    assert read_sharegpt(path, 100, 1) == [Session(two[:1]), Session(half)]
    assert read_sharegpt(path, 1, 9) == [Session(two)]
    plan = Replay(dict.fromkeys("abcd", 10), 0, Distribution.times("2"), 40, 0).plan([Session(two)])
    (item,) = plan.conversations
    assert [(turn.said, turn.max_tokens, turn.think_s) for turn in item.turns] == [("a", 10, 0.0), ("c", 10, 2.0)]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ("[\n{]", "no JSON: Expecting property name enclosed in double quotes: line 2"),
        ({"conversations": []}, "Input should be a valid array"),
        ([talk(("human", "a"), ("gpt", "b")), {}], "1.conversations: Field required"),
        ([{"conversations": ["hello"]}], '0.conversations.0: Input should be an object, not "hello"'),
    ],
)  # fmt: skip
def test_bad_sharegpt_fields_are_named(tmp_path: Path, records: Any, message: str) -> None:
    path = lines(tmp_path / "s.json", records)
    with pytest.raises(WorkloadError) as caught:
        read_sharegpt(path, 100, 9)
    assert str(caught.value).startswith(f"{path}: {message}")
