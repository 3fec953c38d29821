"""The task suite: deterministic, held out, judged as documented."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_bench.data import TEXTS
from millrace_bench.gsm8k import read_items
from millrace_bench.tasks import (
    COPY_WORDS,
    RETRIEVAL_LINES,
    TASKS,
    WORDS,
    Item,
    Match,
    Message,
    Verdict,
    final_number,
    is_held_out,
    judge,
    retrieval,
    sorting,
    wilson_interval,
)


@pytest.mark.parametrize("name", TASKS)
def test_items_are_deterministic_distinct_and_held_out(name):
    items = TASKS[name].items(seed=3, count=6)
    assert items == TASKS[name].items(seed=3, count=6)
    assert items[:3] == TASKS[name].items(seed=3, count=3)
    assert items != TASKS[name].items(seed=4, count=6)
    assert len({item.key for item in items}) == 6
    assert all(is_held_out(item.key) for item in items)


@pytest.mark.parametrize("name", TASKS)
def test_conversations_alternate_and_end_with_the_user(name):
    for item in TASKS[name].items(seed=0, count=20):
        roles = [message.role for message in item.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert judge(item, f" {item.answer}\n") is Verdict.CORRECT


def test_answers_are_right():
    for item in TASKS["addition"].items(0, 50):
        a, b = item.key.removeprefix("addition:").split("+")
        assert 100 <= int(a) <= int(b) <= 999
        assert item.answer == str(int(a) + int(b))
        assert a in item.messages[-1].content
    for item in TASKS["copy"].items(0, 5):
        assert len(item.answer.split()) == COPY_WORDS
        assert item.messages[-1].content.endswith(item.answer)
    for _ in range(20):
        (turn,) = sorting(Random(1)).turns
        assert list(map(int, turn.answer.split())) == sorted(map(int, turn.user.split(":")[1].split()))


@pytest.mark.parametrize("name", RETRIEVAL_LINES)
def test_retrieval_asks_for_one_of_its_distinct_keys(name):
    (item,) = TASKS[name].items(0, 1)
    *lines, question = item.messages[-1].content.splitlines()[1:]
    values = dict(line.removeprefix("- ").split(": ") for line in lines)
    assert len(values) == len(lines) == RETRIEVAL_LINES[name]
    assert values[question.removeprefix("What is the value of ").removesuffix("?")] == item.answer


def test_retrieval_repeats_the_context_only_in_the_first_turn():
    turns = retrieval(Random(0), num_lines=5, num_questions=3).turns
    assert [turn.user.count("\n") for turn in turns] == [6, 0, 0]


def test_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS) == 128


def test_exhausted_task_names_its_limit():
    with pytest.raises(ValueError, match=r"chat: count=5000 exceeds its \d+ held-out items"):
        TASKS["chat"].items(0, 5000)


@pytest.mark.parametrize(
    ("answer", "match", "output", "verdict"),
    [
        ("579", Match.NUMBER, "The sum is 579.", Verdict.CORRECT),
        ("579", Match.NUMBER, "5790", Verdict.WRONG),
        ("579", Match.NUMBER, "no idea", Verdict.INVALID),
        ("fox lamp", Match.EXACT, " fox lamp ", Verdict.CORRECT),
        ("fox lamp", Match.EXACT, "fox lamp lamp", Verdict.WRONG),
        ("fox lamp", Match.EXACT, " \n", Verdict.INVALID),
    ],
)
def test_judge(answer, match, output, verdict):
    assert judge(Item("t", "k", (Message("user", "?"),), answer, match, 8), output) is verdict


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("$3,600.00", "3600"),
        ("-4", "-4"),
        ("2.50 eggs", "2.5"),
        ("3 then 4.", "4"),
        ("none", None),
        ("9 #### 7 x", "7"),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_wilson_interval_known_values():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson_interval(10, 10)[1] == 1.0


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_proportion(counts):
    correct, total = counts
    low, high = wilson_interval(correct, total)
    assert 0 <= low <= correct / total + 1e-12
    assert correct / total - 1e-12 <= high <= 1


def test_gsm8k_uses_the_first_lines_as_worked_examples(tmp_path):
    rows = [{"question": f"q{i}", "answer": f"thus\n#### 1,00{i}"} for i in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    items = read_items(tmp_path / "test.jsonl", shots=2)
    assert [item.answer for item in items] == ["1002", "1003"]
    assert [m.content for m in items[0].messages] == ["q0", "thus\n#### 1,000", "q1", "thus\n#### 1,001", "q2"]
    assert judge(items[0], "it is 1002") is Verdict.CORRECT


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": "#### 1"}', "shots=1 leaves no question"),
        ("{", "test.jsonl:1: not JSON"),
        ('{"question": "q"}', "test.jsonl:1: expected an object"),
        ('{"question": "q", "answer": "4"}', "test.jsonl:1: answer has no '#### number'"),
    ],
)
def test_gsm8k_names_what_is_bad(tmp_path, line, message):
    (tmp_path / "test.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_items(tmp_path / "test.jsonl", shots=1)


def test_perplexity_texts_are_long_enough_to_measure():
    assert len(TEXTS) >= 12
    assert all(text.isascii() and 300 < len(text) < 1200 for text in TEXTS)
