"""What clients of a duel send, and what they note.

Prompts and answers are texts. The tokenizer that all servers get has a word of its own for each id of the vocabulary:
so a text is its token ids, and a wrong token is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
    """Of one run. They keep the sample of each request, and give up on one that hangs."""

    def __init__(self, layout: Layout, kinds: Sequence[str], run: int, patience_s: float) -> None:
        """`patience_s`: how long a request may take."""
        headers, fields = layout.apart(run)
        super().__init__(layout.url, Options(0.0, ignore_eos=True), headers)
        self._fields = [{"model": MODEL, **fields, **KINDS[kind]} for kind in kinds]
        self._patience_s = patience_s
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


class Sender:
    """Sends to one server. Each call is a run, whose prompts no other run finds in a cache."""

    def __init__(self, layout: Layout, words: Sequence[str], kinds: Sequence[str], patience_s: float) -> None:
        self._clients = functools.partial(Clients, layout, kinds, patience_s=patience_s)
        self._words = words
        self._runs = itertools.count()

    def _target(self, load: Load) -> Target:
        return Target("", len(self._words), 2 * load.longest)

    async def send(self, segment: Segment, think_time: str) -> tuple[float, dict[Key, Sample]]:
        """When it began, by time.perf_counter(), and the sample of each request."""
        plan = self._texts(segment.plan(self._target(segment.load), think_time))
        clients = self._clients(run=next(self._runs))
        gc_hooks.freeze()  # collections of this process would count as gaps of the server
        start = time.perf_counter()
        await send(clients, plan, 0, lambda: None, start=start)
        await clients.close()
        return start, clients.seen

    async def burst(self, load: Load, count: int, together: int, seconds: float | None = None) -> None:
        """Requests that nobody counts, so many together; after `seconds` all clients leave."""
        clients = self._clients(run=next(self._runs))
        single = replace(load, turns=1)
        plan = self._texts(workload(single, self._target(single), "0", seed=-1).plan(count))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await send(clients, plan, together, lambda: None)
        await clients.close()

    def _texts(self, plan: Plan) -> Plan:
        """The same with texts in place of ids."""

        def told(turn: Turn) -> Turn:
            return replace(turn, said="".join(self._words[int(index)] for index in turn.said))

        talks = (replace(one, turns=tuple(map(told, one.turns))) for one in plan.conversations)
        return replace(plan, conversations=tuple(talks))
