"""Acceptance on text and in a whole system; how they are measured on a CPU."""

import math

from millrace_bench import drafts
from millrace_bench.data import TEXTS
from millrace_bench.drafts import TEXT, Work
from millrace_bench.eval.backend import Answer


def row(drafted: list[int], accepted: list[int]) -> dict[str, object]:
    facts = {"drafts": len(drafted), "temperature": 0.0, "task": TEXT, "tokens": 9, "accept": 1.75}
    return facts | {"drafted": drafted, "accepted": accepted}


def test_the_accept_length_counts_what_the_answers_have() -> None:
    answers = [
        Answer(output_tokens=8, decode_steps=3),
        Answer(output_tokens=1),
        Answer(output_tokens=2, decode_steps=1),
    ]
    assert drafts.accept_length(answers) == 2.0
    assert math.isnan(drafts.accept_length(answers[1:2]))


def test_an_answer_that_drafts_changed_is_counted() -> None:
    expected = [Answer("a b", (1, 2)), Answer("c", (3,))]
    changed = [Answer("a b", (1, 2)), Answer("c", (4,))]
    (found,) = drafts.compare([(row([], []), expected)], [(row([4, 3], [3, 0]), changed)])
    assert (found["same"], found["items"]) == (1, 2)


def test_works_are_the_texts_and_each_task_at_every_temperature() -> None:
    found = drafts.works(("addition", "sort"), 2, (0.0, 1.0), 5)
    assert [(work.name, work.temperature) for work in found] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in (TEXT, "addition", "sort")
    ]
    text: Work = found[3]
    assert [len(work.jobs) for work in found] == [2] * 6 and text.prompts == [one[: len(one) // 2] for one in TEXTS[:2]]
    assert {job.temperature for work in found[3:] for job in work.jobs} == {1.0}
    assert [job.item.max_tokens for job in text.jobs] == [5, 5]
