"""The control of a server is its first undisturbed run. Other runs of the same requests are held against it."""

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from millrace_bench.duel.evidence import FLOOR, PROOF, WORD, Judged, Usual, words
from millrace_bench.duel.judge import GREEDY, Key, compare, conclude
from millrace_bench.duel.load import ALLOWED, Clients

SAMPLED = 8  # answers of a kind that tell what is usual, and in which faults are planted
PLACES = 64  # of each of them
ASKED = 256  # places of an answer that is judged, evenly spaced
SHOWN = 8  # places of its control there: a server that has changed agrees with itself only
PAGE = 64  # words of a prompt that a planted fault exchanges
TOGETHER = 32  # answers that are asked about at a time
JUDGING_S = 60.0  # of all answers of a run; what is left of them is not judged


class Control:
    """Of requests of these kinds, in turns. What it asks the server, it asks while the server is undisturbed."""

    def __init__(self, run: Clients, kinds: Sequence[str], new: Callable[[], Clients]) -> None:
        """`new`: clients that find no prompt in a cache, where a fault may have left wrong KV."""
        self._run, self._kinds, self._new = run, kinds, new
        self._said = {key: words(one.text) for key, one in run.seen.items() if one.answered}
        self._usual: dict[str, Usual] = {}  # of kinds whose wrong words can be told
        self._exact: set[str] = set()  # kinds of which any other answer is wrong
        self._why = next((one.error for one in run.seen.values() if one.error), "")  # it did not answer

    async def measure(self, runs: Sequence[Clients]) -> list[dict[str, Any]]:
        """By kind, how many answers of these undisturbed runs differ from the control, how far their words are outside,
        and of how many answers the judge tells the planted faults, and undisturbed ones for wrong.
        """
        rows: list[dict[str, Any]] = []
        for kind in self._kinds:
            found = [self._compare(run, kind) for run in runs]
            differ = sum(len(keys) for _, keys in found)
            rows.append({"kind": kind, "answers": sum(answers for answers, _ in found), "differ": differ})
            rows[-1] |= await self._calibrate(kind)
            alarms = [await self._judge(kind, run, keys, JUDGING_S) for run, (_, keys) in zip(runs, found, strict=True)]
            judged, (swapped, of) = sum(alarms, Judged()), rows[-1]["planted"]["prompt"]
            rows[-1] |= {"told": not judged.wrong and 2 * swapped > of, "why": self._why, "judged": asdict(judged)}
        same = all(usual.largest <= FLOOR for usual in self._usual.values())  # in every batch
        self._exact = {row["kind"] for row in rows if same and row["told"] and not row["differ"]} - {GREEDY}
        self._usual = {row["kind"]: self._usual[row["kind"]] for row in rows if row["told"]}
        return rows

    async def _calibrate(self, kind: str) -> dict[str, Any]:
        """What is usual, and the planted faults that it tells: of a prompt, one page of it, the answer or one word."""
        keys = [key for key in self._keys(kind) if any(map(WORD.fullmatch, self._said[key]))][:SAMPLED]
        plain = [(words(self._run.prompts[key]), self._said[key]) for key in keys]
        pairs = list(zip(plain, [*plain[1:], *plain[:1]], strict=True))
        planted = {
            "prompt": [(prompt, said) for (_, said), (prompt, _) in pairs],
            "page": [(_mixed(own, other, PAGE), said) for (own, said), (other, _) in pairs],
            "answer": [(own, _mixed(said, other, len(other))) for (own, said), (_, other) in pairs],
            "word": [(own, _mixed(said, other, 1)) for (own, said), (_, other) in pairs],
        }
        texts = [*plain, *itertools.chain.from_iterable(planted.values())]
        asked = [("".join(prompt), said, sorted({*_places(said, 0, PLACES), _middle(said)})) for prompt, said in texts]
        found = [[one for one in each if one is not None] for each in await self._ask(kind, asked, JUDGING_S)]
        least = max((usual.largest for usual in self._usual.values()), default=0.0)
        usual = self._usual[kind] = Usual.of([one for each in found[: len(plain)] for one in each], least)
        wrong, count = [usual.evidence(each) >= PROOF for each in found[len(plain) :]], len(plain)
        told = {name: [sum(wrong[i * count : (i + 1) * count]), count] for i, name in enumerate(planted)}
        return {"places": usual.places, "largest": usual.largest, "planted": told}

    async def conclude(self, strike: float, run: Clients, *, whole: bool) -> dict[str, Any]:
        """The row of a run whose fault struck then. `whole`: the server serves again, so answers can be judged."""
        until = time.monotonic() + (JUDGING_S if whole else 0.0)
        differ = {kind: self._compare(run, kind)[1] for kind in self._kinds}
        told = [kind for kind in self._kinds if kind in self._usual and kind not in self._exact]
        judged = [await self._judge(kind, run, differ[kind], until - time.monotonic()) for kind in told]
        exact = Judged(wrong=sum(len(differ[kind]) for kind in self._exact))
        untold = sum(len(differ[kind]) for kind in self._kinds if kind not in {*told, *self._exact})
        return conclude(strike, run.seen, sum(map(len, differ.values())), sum(judged, exact), untold)

    def _keys(self, kind: str) -> list[Key]:
        return [key for key in self._said if self._kinds[key[0] % len(self._kinds)] == kind]

    def _compare(self, run: Clients, kind: str) -> tuple[int, list[Key]]:
        return compare(self._run.seen, run.seen, self._kinds.index(kind), len(self._kinds))

    async def _judge(self, kind: str, run: Clients, keys: Collection[Key], seconds: float) -> Judged:
        """Answers behind the last word that they have in common with the control. Options or the schema forbid what is
        no word and in no control.
        """
        marks = set(itertools.chain.from_iterable(map(self._said.__getitem__, self._keys(kind))))
        asked, bad = [], []
        for key in keys:
            answer, control, prompt = words(run.seen[key].text), self._said[key], run.prompts[key]
            pairs = zip(control, answer, strict=False)
            first = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            asked.append((prompt, answer, _places(answer, first, ASKED)))
            asked.append((prompt, control, _places(control, first, ASKED)[:SHOWN]))
            short = run.seen[key].answered and len(answer) != len(control)
            bad.append(short or any(not WORD.fullmatch(one) and one not in marks for one in answer))
        found = iter(await self._ask(kind, asked, seconds))
        return sum((Judged.of(self._usual[kind], [next(found), next(found)], bad=one) for one in bad), Judged())

    async def _ask(
        self, kind: str, asked: Sequence[tuple[str, Sequence[str], Sequence[int]]], seconds: float
    ) -> list[list[float | None]]:
        """How far the words of answers behind prompts are outside, at places. None: there was no answer."""
        clients, room, until = self._new(), asyncio.Semaphore(TOGETHER), time.monotonic() + seconds

        async def one(prompt: str, said: Sequence[str], places: Sequence[int]) -> list[float | None]:
            found: list[float | None] = []
            async with room:
                for at in places:
                    text, left = prompt + "".join(said[:at]), until - time.monotonic()
                    found.append(await clients.outside(text, said[at], ALLOWED.get(kind, 1), left))
            return found

        found = await asyncio.gather(*(one(*each) for each in asked))
        await clients.close()
        self._why = clients.why or self._why
        return found


def _places(said: Sequence[str], first: int, most: int) -> list[int]:
    """Of words, from the first place on, at most so many."""
    places = [at for at in range(first, len(said)) if WORD.fullmatch(said[at])]
    return places[:: -(-len(places) // most) or 1]


def _middle(said: Sequence[str]) -> int:
    at = len(said) // 2  # where each JSON answer may have a quote: the first word from there on
    return next((word for word in range(at, len(said)) if WORD.fullmatch(said[word])), at)


def _mixed(own: Sequence[str], other: Sequence[str], size: int) -> list[str]:
    """Words with so many of another text from the middle on."""
    at = _middle(own)
    return [*own[:at], *other[at : at + size], *own[at + size :]]
