"""What clients of a duel send, and what they note.

Prompts and answers are texts. The tokenizer that all servers get has a word of its own for each id of the vocabulary:
so a text is its token ids, and a wrong token is seen.
"""

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

import httpx
from millrace_cli.cluster import TINY
from millrace_common import gc_hooks
from millrace_load.clients import HttpClient, Job, Options, Sample, Target
from millrace_load.sending import send
from millrace_load.workload import Plan, Turn

from millrace_bench import v3
from millrace_bench.duel.judge import GREEDY, HUNG, Key
from millrace_bench.duel.parts import Layout
from millrace_bench.duel.ties import TOP, Step, steps
from millrace_bench.pd_load import Load, Segment, workload

SCHEMA = {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 4096}  # as long as is asked for
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
KINDS: Mapping[str, Mapping[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "json": {"temperature": 0.0, "ignore_eos": False, "response_format": FORMAT},
}
MODEL = "duel"  # its name, and that of its folder
THINK_TIME = "1"  # seconds between turns
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LEAST_VOCABULARY = 2048
NO_WORDS = 261  # ids of special tokens and of bytes, which are the first
ONLY_WORDS = {**KINDS[GREEDY], "logit_bias": {str(index): -100 for index in range(NO_WORDS)}}


def write_model(folder: Path, widths: str, layers: int) -> list[str]:
    """config.json of these widths without MTP layers, which random weights make useless, and the tokenizer of
    models/tiny with a word for each id that is neither a special token nor a byte. -> these words
    """
    v3.write_folder(folder, widths, layers)
    tiny, shape, tokenizer = (
        json.loads(path.read_text())
        for path in (TINY / "config.json", folder / "config.json", folder / "tokenizer.json")
    )
    config = {**tiny, **shape, "num_nextn_predict_layers": 0, "rope_scaling": YARN}  # peers read more keys than we do
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["vocab_size"] = max(config["vocab_size"], LEAST_VOCABULARY)
    vocabulary = {token: index for token, index in tokenizer["model"]["vocab"].items() if index < NO_WORDS}
    letters = ("Ġ" + "".join(word) for word in itertools.product(string.ascii_lowercase, repeat=4))
    words = (word for word in letters if word not in vocabulary)
    new = dict(zip(words, range(len(vocabulary), config["vocab_size"]), strict=False))
    # With `ignore_merges` a word that is known is one token.
    tokenizer["model"] |= {"vocab": vocabulary | new, "ignore_merges": True, "merges": []}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return [word.replace("Ġ", " ") for word in new]


class Clients(HttpClient):
    """Of one run, whose prompts no other run finds in a cache. They give up on a request that hangs."""

    def __init__(
        self,
        layout: Layout,
        words: Sequence[str],
        kinds: Sequence[str],
        patience_s: float,
        number: int,
        *,
        only_words: bool = False,
    ) -> None:
        """`patience_s`: how long a request may take. `number`: of the run. `only_words`: greedy answers have no other
        tokens, so that their text can be sent back as the same token ids.
        """
        self.headers, fields = layout.apart(number)
        super().__init__(layout.url, Options(0.0, ignore_eos=True), self.headers)
        self._own = {"model": MODEL, **fields}
        told = {**KINDS, GREEDY: ONLY_WORDS} if only_words else KINDS
        self._fields = [{**self._own, **told[kind]} for kind in kinds]
        self._words, self._patience_s = words, patience_s
        self.seen: dict[Key, Sample] = {}
        self.prompts: dict[Key, str] = {}

    def body(self, job: Job) -> dict[str, Any]:
        return {**super().body(job), **self._fields[job.index % len(self._fields)]}

    async def send(self, job: Job, sample: Sample) -> None:
        self.seen[job.index, sample.turn] = sample
        self.prompts[job.index, sample.turn] = str(job.prompt)
        try:
            async with asyncio.timeout(self._patience_s):
                await super().send(job, sample)
        except TimeoutError:
            sample.error, sample.end = HUNG, time.perf_counter()

    async def steps(self, text: str, count: int) -> list[Step]:
        """What the server says behind a text, greedily; nothing if it fails."""
        body = {**self._own, **ONLY_WORDS, "prompt": text, "max_tokens": count, "ignore_eos": True, "logprobs": TOP}
        with contextlib.suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(self._patience_s):
                response = await self._http.post("/v1/completions", json=body)
            if response.status_code == httpx.codes.OK:
                return steps(response.json()["choices"][0]["logprobs"])
        return []

    def plan(self, segment: Segment) -> Plan:
        return self._texts(segment.plan(self._target(segment.load), THINK_TIME))

    async def load(self, segment: Segment) -> float:
        """Send it; when it began, by time.perf_counter()."""
        plan = self.plan(segment)
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
