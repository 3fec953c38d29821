"""The control of a server is its first undisturbed run. Other runs of the same requests are held against it."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from millrace_bench.duel.judge import GREEDY, Compared, Key, compare, conclude
from millrace_bench.duel.load import Clients
from millrace_bench.duel.ties import WORD, Judged, Margin, Step, Walk, recompute, walk, words

SAMPLED = 16  # answers that are computed again
WALKS = 16  # answers that are judged at a time
JUDGING_S = 60.0  # of all answers of a run; what is left of them is not judged


class Control:
    """Of requests of these kinds, in turns. What it asks the server, it asks while the server is undisturbed."""

    def __init__(self, run: Clients, kinds: Sequence[str], new: Callable[[], Clients], vocabulary: int) -> None:
        """`new`: clients that find no prompt in a cache, where a fault may have left wrong KV. `vocabulary`: words."""
        self._run, self._kinds, self._new, self._vocabulary = run, kinds, new, vocabulary
        self._noisy = dict.fromkeys(kinds, False)
        self._margin: Margin | None = None  # of near-ties; None: greedy answers cannot be judged

    async def measure(self, runs: Sequence[Clients]) -> list[dict[str, Any]]:
        """By kind, how many answers of these undisturbed runs differ from the control. Of greedy ones also the margin
        of near-ties, and whether wrong tokens can be told by it.
        """
        rows: list[dict[str, Any]] = []
        for kind in self._kinds:
            found = [self._compare(run, kind) for run in runs]
            differ = sum(len(one.differ) for one in found)
            self._noisy[kind] |= differ > 0
            rows.append({"kind": kind, "answers": sum(one.answers for one in found), "differ": differ})
            if kind == GREEDY:
                walks = [await self._walks(run, one.differ) for run, one in zip(runs, found, strict=True)]
                rows[-1] |= await self._measure_margin([one for each in walks for one in each])
        return rows

    async def _measure_margin(self, walks: Sequence[Walk]) -> dict[str, Any]:
        kinds, seen = len(self._kinds), self._run.seen.items()
        greedy = {key: words(one.text) for key, one in seen if self._kinds[key[0] % kinds] == GREEDY and one.answered}
        margin = Margin.of([*walks, *await self._recompute(list(greedy)[:SAMPLED])], self._vocabulary)
        told = all(WORD.fullmatch(word) for text in greedy.values() for word in text)
        self._margin = margin if told else None
        if margin.words_within > 1:  # what a fault makes the server compute again may be another answer of any kind
            self._noisy = dict.fromkeys(self._kinds, True)
        return {"margin": asdict(margin), "told": told, **asdict(Judged.of(walks, margin.nats))}

    async def _recompute(self, keys: Collection[Key]) -> list[Walk]:
        once, again, run = self._new(), self._new(), self._run
        asked = (recompute(once.steps, again.steps, run.prompts[key], run.seen[key].output_tokens) for key in keys)
        found = await asyncio.gather(*asked)
        await asyncio.gather(once.close(), again.close())
        return found

    async def conclude(self, strike: float, run: Clients, *, whole: bool) -> dict[str, Any]:
        """The row of a run whose fault struck then. `whole`: the server serves again, so answers can be judged."""
        judged = None
        if self._margin is not None:
            walks = await self._walks(run, self._compare(run, GREEDY).differ, JUDGING_S if whole else 0.0)
            judged = Judged.of(walks, self._margin.nats)
        return conclude(strike, self._run.seen, run.seen, self._noisy, judged)

    def _compare(self, run: Clients, kind: str) -> Compared:
        return compare(self._run.seen, run.seen, self._kinds.index(kind), len(self._kinds))

    async def _walks(self, run: Clients, keys: Collection[Key], seconds: float = JUDGING_S) -> list[Walk]:
        clients, room, until = self._new(), asyncio.Semaphore(WALKS), time.monotonic() + seconds

        async def ask(text: str, count: int) -> list[Step]:
            return await clients.steps(text, count) if time.monotonic() < until else []

        async def one(key: Key) -> Walk:
            control, answer = self._run.seen[key], run.seen[key]
            async with room:
                return await walk(ask, run.prompts[key], words(control.text), words(answer.text), answer.answered)

        found = await asyncio.gather(*map(one, keys))
        await clients.close()
        return found
