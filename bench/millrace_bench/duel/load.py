"""What clients of a duel send, and what they note.

Prompts and answers are texts. The tokenizer that all servers get has a word of its own for each id of the vocabulary:
so a text is its token ids, and a wrong token is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace_cli.cluster import TINY
from millrace_common import gc_hooks
from millrace_load.clients import HttpClient, Job, Options, Sample, Target
from millrace_load.sending import send
from millrace_load.workload import Plan, Turn

from millrace_bench import v3
from millrace_bench.duel.judge import HUNG, Key
from millrace_bench.duel.parts import Layout
from millrace_bench.pd_load import Load, Segment, workload

SCHEMA = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": ["integer", "string"]}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "json": {"temperature": 0.0, "ignore_eos": False, "response_format": FORMAT},
}
MODEL = "duel"  # its name, and that of its folder
LEAST_VOCABULARY = 2048  # twice that of models/tiny


def write_model(folder: Path, widths: str, layers: int) -> list[str]:
    """config.json of these widths without MTP layers, which random weights make useless, and the tokenizer of
    models/tiny with a word for each further id. -> these words
    """
    v3.write_folder(folder, widths, layers)
    tiny, shape, tokenizer = (
        json.loads(path.read_text())
        for path in (TINY / "config.json", folder / "config.json", folder / "tokenizer.json")
    )
    config = {**tiny, **shape, "num_nextn_predict_layers": 0}  # peers read more keys than we do
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["vocab_size"] = max(config["vocab_size"], LEAST_VOCABULARY)
    vocabulary = tokenizer["model"]["vocab"]
    letters = ("Ġ" + "".join(word) for word in itertools.product(string.ascii_lowercase, repeat=4))
    words = (word for word in letters if word not in vocabulary)
    new = dict(zip(words, range(len(vocabulary), config["vocab_size"]), strict=False))
    tokenizer["model"] |= {"vocab": vocabulary | new, "ignore_merges": True}  # a word that is known is one token
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return [word.replace("Ġ", " ") for word in new]


class Clients(HttpClient):
    """Of one run, whose prompts no other run finds in a cache. They give up on a request that hangs."""

    def __init__(
        self, layout: Layout, words: Sequence[str], kinds: Sequence[str], patience_s: float, number: int
    ) -> None:
        """`patience_s`: how long a request may take. `number`: of the run."""
        headers, fields = layout.apart(number)
        super().__init__(layout.url, Options(0.0, ignore_eos=True), headers)
        self._fields = [{"model": MODEL, **fields, **KINDS[kind]} for kind in kinds]
        self._words, self._patience_s = words, patience_s
        self.seen: dict[Key, Sample] = {}

    def body(self, job: Job) -> dict[str, Any]:
        return {**super().body(job), **self._fields[job.index % len(self._fields)]}

    async def send(self, job: Job, sample: Sample) -> None:
        self.seen[job.index, sample.turn] = sample
        try:
            async with asyncio.timeout(self._patience_s):
                await super().send(job, sample)
        except TimeoutError:
            sample.error, sample.end = HUNG, time.perf_counter()

    async def load(self, segment: Segment, think_time: str) -> float:
        """Send it; when it began, by time.perf_counter()."""
        plan = self._texts(segment.plan(self._target(segment.load), think_time))
        gc_hooks.freeze()  # collections of this process would count as gaps of the server
        start = time.perf_counter()
        await send(self, plan, 0, lambda: None, start=start)
        await self.close()
        return start

    async def burst(self, load: Load, count: int, together: int, seconds: float | None = None) -> None:
        """Single requests that nobody counts, `together` at a time; after `seconds` all clients leave."""
        single = replace(load, turns=1)
        plan = self._texts(workload(single, self._target(single), "0", seed=-1).plan(count))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await send(self, plan, together, lambda: None)
        await self.close()

    def _target(self, load: Load) -> Target:
        return Target(MODEL, len(self._words), 2 * load.longest)

    def _texts(self, plan: Plan) -> Plan:
        """The same with texts in place of ids."""

        def told(turn: Turn) -> Turn:
            return replace(turn, said="".join(self._words[int(index)] for index in turn.said))

        talks = (replace(one, turns=tuple(map(told, one.turns))) for one in plan.conversations)
        return replace(plan, conversations=tuple(talks))
