"""The judge of the duel before a made-up server with the noise of GPUs: real faults are found, noise is not."""

import asyncio
import itertools
import random
import re
import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_bench.duel import load
from millrace_bench.duel.control import Control
from millrace_bench.duel.evidence import BIAS, FLOOR, PROOF, SLACK, Usual, outside, words
from millrace_bench.duel.judge import Key
from millrace_bench.duel.load import ALLOWED, KINDS
from millrace_bench.duel.parts import Layout
from millrace_load.clients import Sample
from millrace_rpc.http_server import HttpServer
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

VOCABULARY = [f" {a}{b}{a}{b}" for a in "abcdefghijklmno" for b in "pqrstuvwxy"]
SIGMA = 1.7  # of logits, as of V3's widths with random weights
LENGTH, EXACT = 60, 9  # words of an answer; seed of a server without noise
KIND = list(KINDS)


def drawn(*of: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(of).encode()))


class Clients:
    """What clients saw of a made-up server, whose noise is another one in each run. They ask it as well."""

    def __init__(self, seed: int, run: object) -> None:
        self.seed, self.run = seed, run
        rng = random.Random(seed)
        self.prompts: dict[Key, str] = {(index, 0): "".join(rng.choices(VOCABULARY, k=80)) for index in range(24)}
        self.seen: dict[Key, Sample] = {}
        self.why = ""

    def answered(self) -> "Clients":
        for key in self.prompts:
            self.say(key, self.answer(key))
        return self

    def say(self, key: Key, said: Sequence[str]) -> None:
        self.seen[key] = Sample(0.0, [0.0], 9, 0, len(said), text="".join(said))

    def logits(self, text: str) -> np.ndarray:
        noise = drawn(text, self.run)
        scale = 0.5 if noise.random() < 0.1 else 0.02  # nats: where the gate of an expert was a near-tie, and else
        scale *= self.seed != EXACT
        exact = SIGMA * drawn(self.seed, text).normal(size=len(VOCABULARY))
        return exact + scale * noise.normal(size=len(VOCABULARY))

    def answer(self, key: Key, begun: Sequence[str] = (), prompt: str = "") -> list[str]:
        """Of the kind of its request. `begun`: what was said already. `prompt`: whose KV the server reads instead."""
        kind, said = KIND[key[0] % 3], list(begun)
        said = said or (["[", '"'] if kind == "json" else [])
        while len(said) < LENGTH:
            logits = self.logits((prompt or self.prompts[key]) + "".join(said))
            best = np.argsort(-logits)[: ALLOWED.get(kind, 1)]
            odds = np.exp(logits[best])
            said.append(VOCABULARY[drawn(key, len(said)).choice(best, p=odds / odds.sum())])
            if kind == "json" and len(said) == LENGTH // 2:
                said.append('"')
        return said

    async def outside(self, text: str, word: str, allowed: int, seconds: float) -> float | None:
        logits = self.logits(text)
        return float(max(0.0, np.sort(logits)[-allowed] - logits[VOCABULARY.index(word)]))

    async def close(self) -> None: ...


def judge(first: Clients) -> Control:
    again = (Clients(first.seed, number) for number in itertools.count(100))
    return Control(cast("Any", first), KIND, lambda: cast("Any", next(again)))


def corrupt(run: Clients, fault: str) -> None:
    """An answer of each kind, from its middle on."""
    for key in [(index, 0) for index in range(6, 9)]:
        own, other = run.prompts[key], run.prompts[key[0] + 3, 0]
        half, rest = words(run.seen[key].text)[: LENGTH // 2], words(run.seen[key[0] + 3, 0].text)[LENGTH // 2 :]
        prompt = {"KV of another request": other, "a page was overwritten": own[:200] + other[200:]}.get(fault)
        run.say(key, run.answer(key, half, prompt) if prompt else [*half, *rest])


async def found(seed: int, fault: str = "") -> Any:
    first, second, struck = (Clients(seed, run).answered() for run in range(3))
    control = judge(first)
    rows = await control.measure([second])
    if fault:
        corrupt(struck, fault)
    return rows, await control.conclude(0.0, cast("Any", struck), whole=True)


@pytest.mark.parametrize("fault", ["KV of another request", "a page was overwritten", "continues another prompt"])
async def test_a_real_fault_is_found_in_answers_of_all_kinds(fault: str) -> None:
    rows, row = await found(1, fault)
    assert all(one["told"] and one["differ"] > 4 for one in rows), "noise makes most answers differ"
    assert row["differ"] > 15 and row["wrong"] == 3 and not row["cannot_be_told"]


@pytest.mark.parametrize("seed", range(2, 4))
async def test_noise_is_no_fault(seed: int) -> None:
    rows, row = await found(seed)
    assert all(one["told"] and one["planted"]["page"] == one["planted"]["answer"] == [8, 8] for one in rows)
    assert row["differ"] > 15 and row["places"] > 300
    assert (row["wrong"], row["not_judged"], row["cannot_be_told"]) == (0, 0, 0) and row["most"] < PROOF


async def test_one_word_is_found_in_answers_of_all_kinds_without_noise() -> None:
    rows, _ = await found(EXACT)
    assert all(one["planted"]["word"] == [8, 8] for one in rows)


def test_a_rare_word_far_outside_is_no_proof_but_some_are() -> None:
    usual = Usual.of([0.0] * 400 + [0.1, 0.3, 0.8, 1.5] * 10)
    assert (usual.places, usual.largest) == (440, 1.5)
    assert usual.evidence([0.0, 99.0, 99.0, 0.0]) < PROOF / 2 and usual.evidence([99.0] * int(SLACK)) < PROOF
    assert usual.evidence([0.0] * 90 + [99.0] * 12) > PROOF
    assert usual.evidence([1.0] * 9) < PROOF < usual.evidence([0.0, *[1.0] * 40, 0.0])
    exact = Usual.of([0.0] * 64)
    assert exact.evidence([FLOOR / 100] * 60) < PROOF < exact.evidence([0.1]), "exact ties only"


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 2**32), st.floats(0.01, 2.0), st.floats(0.02, 0.9))
def test_undisturbed_words_are_no_proof(seed: int, scale: float, often: float) -> None:
    """Also with the long tail of a logarithm's normal law, far beyond what was measured."""
    rng = np.random.default_rng(seed)
    found = scale * rng.lognormal(0.0, 0.7, 4000) * (rng.random(4000) < often)
    usual = Usual.of(found[:500].tolist())
    assert max(usual.evidence(part.tolist()) for part in np.split(found[500:], 14)) < PROOF


LISTED = {" aaaa": -2.0, " bbbb": -2.5, " cccc": -3.0, "[": -1.0, "bytes:\\xe2": -1.5}


@pytest.mark.parametrize(
    ("word", "own", "allowed", "found"),
    [(" aaaa", -2.0, 1, 0.0), (" bbbb", -2.5, 1, 0.5), (" bbbb", -2.5, 2, 0.0), (" dddd", -9.0, 2, 6.5)],
)
def test_how_far_a_word_is_outside(word: str, own: float, allowed: int, found: float) -> None:
    """Millrace's logprobs are those before the bias, SGLang's those behind it."""
    behind = {name: value - BIAS - own for name, value in LISTED.items() if name != word}
    for top, said in ((LISTED, own), ({**behind, word: 0.0}, 0.0)):
        logprobs = {"tokens": [word], "token_logprobs": [said], "top_logprobs": [top], "text_offset": [0]}
        assert outside(logprobs, word, allowed) == pytest.approx(found)
        assert outside({**logprobs, "tokens": [" zzzz"]}, word, allowed) is None


async def test_a_server_that_has_changed_is_wrong_though_it_agrees_with_itself() -> None:
    first, other = Clients(6, 0).answered(), Clients(7, 1)
    control = judge(first)
    await control.measure([Clients(6, 2).answered()])
    control._new = lambda: cast("Any", other)
    other.prompts = first.prompts
    assert (await control.conclude(0.0, cast("Any", other.answered()), whole=True))["wrong"] == 24


async def test_where_nobody_can_ask_nothing_is_told() -> None:
    first, second, struck = (Clients(8, run).answered() for run in range(3))
    control = judge(first)
    control._ask = lambda kind, asked, seconds: asyncio.sleep(0, [[None]] * len(asked))
    assert not any(one["told"] for one in await control.measure([second]))
    row = await control.conclude(0.0, cast("Any", struck), whole=True)
    assert row["cannot_be_told"] == row["differ"] and not row["wrong"]


SAID = {"tokens": [" aaab"], "token_logprobs": [-1.0]}
REPLIES: dict[str, tuple[object, int, str]] = {
    "refused": ({"error": "no logit_bias"}, 400, "HTTP 400: .*no logit_bias"),
    "no logprobs": ({"choices": [{"logprobs": None}]}, 200, "HTTP 200: .*null"),
    "no top": ({"choices": [{"logprobs": {**SAID, "top_logprobs": None}}]}, 200, "HTTP 200: .*null"),
    "empty top": ({"choices": [{"logprobs": {**SAID, "top_logprobs": [None]}}]}, 200, "HTTP 200: .*null"),
    "no JSON": ("text", 200, "HTTP 200: .text"),
    "hung": (None, 200, "no answer in time"),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_why_a_server_does_not_tell(name: str) -> None:
    """A judge that hangs has the time of the judging, and not that of a request."""
    content, status, why = REPLIES[name]

    async def reply(_: object) -> JSONResponse:
        await (asyncio.Event().wait() if content is None else asyncio.sleep(0))
        return JSONResponse(content, status)

    server = HttpServer(Starlette(routes=[Route("/v1/completions", reply, methods=["POST"])]))
    port = server.start("127.0.0.1:0")
    layout = Layout((), f"http://127.0.0.1:{port}", 1, "", lambda number: ({}, {}))
    clients = load.Clients(layout, [" aaaa", " aaab"], [], 3600.0, 1)
    assert await clients.outside(" aaaa", " aaab", 1, 0.3 if content is None else 60.0) is None
    assert re.match(why, clients.why), clients.why
    await clients.close()
    await server.stop()
