"""Greedy answers along a made-up server: near-ties are told from wrong tokens."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_bench.duel.control import Control
from millrace_bench.duel.judge import Key
from millrace_bench.duel.ties import (
    ASKS,
    STRETCH,
    TOP,
    Judged,
    Margin,
    Place,
    Step,
    Walk,
    recompute,
    steps,
    walk,
    words,
)
from millrace_load.clients import Sample

VOCABULARY = [f" {a}{b}{a}{b}" for a in "abcdefghijklmno" for b in "pqrstuvwxy"]
NOISE = 0.02  # of logprobs, in nats, uniformly on both sides
PROMPT = " aaaa bbbb"


@dataclass
class Server:
    """The logprobs of all words behind a text are drawn by the text. Those of one run have noise."""

    seed: int
    noise: float = NOISE
    asked: int = 0
    fails: bool = False
    run: object = "quiet"  # of what it is asked

    def logprobs(self, text: str, run: object) -> dict[str, float]:
        drawn, noisy = random.Random(f"{self.seed}{text}"), random.Random(f"{self.seed}{text}{run}")
        return {word: 3 * drawn.gauss() + self.noise * noisy.uniform(-1, 1) for word in VOCABULARY}

    def answer(self, run: object, length: int, begun: Sequence[str] = (), prompt: str = PROMPT) -> list[str]:
        said = list(begun)
        while len(said) < length:
            found = self.logprobs(prompt + "".join(said), run)
            said.append(max(found, key=found.__getitem__))
        return said

    async def ask(self, text: str, count: int) -> list[Step]:
        self.asked += 1
        said = "" if self.fails else text
        found = []
        while said and len(found) < count:
            top = sorted(self.logprobs(said, self.run).items(), key=lambda item: -item[1])[:TOP]
            said += top[0][0]
            found.append(Step(top[0][0], {word: top[0][1] - value for word, value in top}))
        return found

    async def walk(self, control: Sequence[str], answer: Sequence[str], whole: bool = True) -> Walk:
        return await walk(self.ask, PROMPT, control, answer, whole)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 40))
async def test_undisturbed_answers_have_near_ties_only(seed: int, length: int) -> None:
    server = Server(seed)
    control, *others = [server.answer(run, length) for run in range(4)]
    walks = [await server.walk(control, other) for other in others]
    assert all(one.ended for one in walks)
    found = Judged.of(walks, 4 * NOISE)  # two words may each be off by twice the noise
    assert (found.wrong_tokens, found.wrong, found.not_judged) == (0, 0, 0) and found.places == found.near_ties
    assert bool(found.places) == any(other != control for other in others)
    assert Margin.of(walks, len(VOCABULARY)).largest <= 4 * NOISE


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 2**32), st.integers(0, 29))
async def test_a_word_that_is_not_likely_is_found_behind_near_ties(seed: int, at: int) -> None:
    """The words behind it are right again, given what is before them."""
    server = Server(seed)
    control, answer = server.answer(0, 30), server.answer(1, at)
    least = server.logprobs(PROMPT + "".join(answer), "quiet")
    answer = server.answer(1, 30, [*answer, min(least, key=least.__getitem__)])
    found = Judged.of([await server.walk(control, answer)], 4 * NOISE)
    assert (found.wrong_tokens, found.wrong, found.not_judged) == (1, 1, 0)


async def test_a_server_without_noise_is_given_ties_only() -> None:
    server = Server(7, noise=0.0)
    control = server.answer(0, 200)
    assert Margin.of([], len(VOCABULARY)).nats == 0
    second = sorted(server.logprobs(PROMPT, "quiet").items(), key=lambda item: -item[1])[1][0]
    found = Judged.of([await server.walk(control, server.answer(0, 200, [second]))], 0.0)
    assert (found.places, found.wrong_tokens, found.wrong) == (1, 1, 1)
    assert server.asked == 1 + -(-199 // STRETCH), "each stretch is asked for once"


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.integers(0, 2**32))
async def test_the_margin_knows_how_a_text_rounds_as_a_prompt(seed: int) -> None:
    server, again = Server(seed), Server(seed, noise=3 * NOISE)
    found = await recompute(server.ask, again.ask, PROMPT, 40)
    largest = Margin.of([found], len(VOCABULARY)).largest
    assert len(found.places) == 8 and NOISE / 4 < largest <= 2 * (NOISE + 3 * NOISE)
    same = await recompute(server.ask, server.ask, PROMPT, 40)
    assert Margin.of([same], len(VOCABULARY)).largest == 0


async def test_what_may_be_asked_has_an_end() -> None:
    server = Server(3, noise=30.0)  # parts everywhere
    found = await server.walk(server.answer(0, 200), server.answer(1, 200))
    assert server.asked == ASKS and not found.ended
    judged = Judged.of([found], margin=100.0)
    assert (judged.places, judged.wrong, judged.not_judged) == (ASKS, 0, 1)
    server.fails = True
    assert await server.walk([" aaaa"], [" bbbb"]) == Walk((), ended=False) and server.asked == ASKS + 1


async def test_a_server_that_has_changed_is_wrong_though_it_agrees_with_itself() -> None:
    answer, control = Server(1, noise=0.0).answer(0, 5), Server(2, noise=0.0).answer(0, 5)
    assert Judged.of([await Server(1, noise=0.0).walk(control, answer)], 0.0).wrong == 1


@pytest.mark.parametrize(
    ("answer", "whole", "wrong"),
    [(2, True, 1), (4, True, 1), (3, True, 0), (2, False, 0)],
)
async def test_a_whole_answer_has_all_its_words(answer: int, whole: bool, wrong: int) -> None:
    server = Server(5, noise=0.0)
    found = await server.walk(server.answer(0, 3), server.answer(0, answer), whole)
    assert found.ended and Judged.of([found], 0.0).wrong == wrong


LISTED = (0.0, 0.1, 0.4)


def test_a_place() -> None:
    ways = [(Place(0.1, LISTED), 0.1), (Place(0.1, LISTED), 0.09), (Place(None, LISTED), 0.3), (Place(None), 9.0)]
    assert [place.verdict(margin) for place, margin in ways] == ["near-tie", "wrong", "wrong", "wrong"]
    assert Place(None, LISTED).verdict(0.4) == "untold", "it may be as likely as those that are listed"


def test_an_answer_is_wrong_or_not_judged_or_has_near_ties_only() -> None:
    tie, wrong, untold = Place(0.1, LISTED), Place(0.4, LISTED), Place(None, (0.0, 0.2))
    ways = [((tie, tie), True), ((tie, wrong, wrong), False), ((untold, tie), True), ((tie,), False)]
    walks = [Walk(places, ended) for places, ended in ways]
    assert Judged.of(walks, 0.2) == Judged(places=8, near_ties=5, wrong_tokens=2, wrong=1, not_judged=2)
    assert Judged.of([], 0.2) == Judged()


def test_the_margin_is_above_the_largest_difference() -> None:
    def margin(*places: Place) -> Margin:
        return Margin.of([Walk(places, True)], vocabulary=100)

    assert margin() == Margin(0.0, 0.0, 1.0, 0.01, too_wide=False)
    found = margin(Place(0.2, LISTED), Place(0.05, LISTED), Place(None, LISTED))
    assert (found.largest, found.words_within, found.share, found.too_wide) == (0.2, 2.0, 0.02, False)
    assert found.nats == pytest.approx(0.3)
    wide = Place(0.4, LISTED)
    assert not margin(wide, Place(0.1, (0.0, 1.0))).too_wide and margin(wide, Place(0.1, LISTED)).too_wide


def test_the_logprobs_of_a_completion() -> None:
    """As both servers send them. What the answer may not have is not counted as likely."""
    top = [{" aaaa": -2.0, " bbbb": -2.5, "[": -1.0, "bytes:\\xe2": -1.5, "token_id:5": -1.8}, None]
    logprobs = {
        "tokens": [" aaaa", " cccc"],
        "token_logprobs": [-2.0, -3.0],
        "top_logprobs": top,
        "text_offset": [0, 5],
    }
    assert steps(logprobs) == [Step(" aaaa", {" aaaa": 0.0, " bbbb": 0.5}), Step(" cccc", {" cccc": 0.0})]


def test_the_words_of_a_text() -> None:
    assert words("") == [] and words(" abcd efgh") == [" abcd", " efgh"]
    assert words(" abcdx efgh\n ab") == [" abcd", "x", " efgh", "\n", " ", "a", "b"]


class Clients:
    """What clients saw of a made-up server: answers of two kinds in turns. They ask it as well."""

    def __init__(self, noise: float, run: int) -> None:
        self.server = Server(11, noise, run=run)
        self.prompts: dict[Key, str] = {(index, 0): f" aaaa {'abcdefgh'[index] * 4}" for index in range(8)}
        answers = {key: self.server.answer(run, 20, prompt=prompt) for key, prompt in self.prompts.items()}
        self.seen = {key: Sample(0.0, [0.0], 9, 0, 20, text="".join(said)) for key, said in answers.items()}
        self.steps = self.server.ask

    def change(self, key: Key) -> None:
        said = words(self.seen[key].text)
        self.seen[key].text = "".join([*said[:9], next(word for word in VOCABULARY if word not in said), *said[10:]])

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("noise", "wrong", "not_judged", "untold"),
    [
        (0.0, 2, 0, 0),
        (0.05, 1, 0, 1),  # a fault may make a near-tie of the other kind
        (30.0, 0, 1, 1),  # the margin is too wide for a word that is not listed
    ],
)
async def test_what_can_be_told_of_a_changed_answer(noise: float, wrong: int, not_judged: int, untold: int) -> None:
    runs = itertools.count(1)
    first, same, changed = (Clients(noise, 0) for _ in range(3))
    control: Any = Control(cast("Any", first), ["greedy", "json"], lambda: cast("Any", Clients(noise, next(runs))), 150)
    greedy, _ = await control.measure([same])
    assert (greedy["told"], greedy["answers"], greedy["differ"]) == (True, 4, 0)
    assert greedy["margin"]["too_wide"] is (noise > 1)
    changed.change((0, 0))
    changed.change((1, 0))
    row = await control.conclude(0.0, changed, whole=True)
    found = (row["differ"], row["wrong"], row["not_judged"], row["cannot_be_told"])
    assert found == (2, wrong, not_judged, untold)
    assert (await control.conclude(0.0, changed, whole=False))["not_judged"] == 1
