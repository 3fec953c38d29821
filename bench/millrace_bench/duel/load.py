"""What clients of a duel send, and what they note.

Prompts and answers are texts. The tokenizer that all servers get has a word of its own for each id of the vocabulary:
so a text is its token ids, and a wrong token is seen.
"""

import asyncio
import itertools
import json
import string
import time
from collections.abc import Sequence
from contextlib import suppress
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
from millrace_bench.data import read_data
from millrace_bench.duel.evidence import BIAS, TOP, outside
from millrace_bench.duel.judge import HUNG, Key
from millrace_bench.duel.parts import Layout
from millrace_bench.pd_load import Load, Segment, workload

MODEL = "duel"  # its name, and that of its folder
THINK_TIME = "1"  # seconds between turns
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LEAST_VOCABULARY = 2048
NO_WORDS = 261  # ids of special tokens and of bytes, which are the first
ONE = {"max_tokens": 1, "ignore_eos": True, "logprobs": TOP}  # token, and what is said of it
KINDS, BODIES = read_data("duel.yaml").values()
WORDS = {str(index): -100 for index in range(NO_WORDS)}  # of an answer that is sent back as text, so as token ids
JUDGED = {kind: body | {"logit_bias": WORDS | body.get("logit_bias", {})} for kind, body in BODIES.items()}
ALLOWED = {"seeded": BODIES["seeded"]["top_k"]}  # words among which the server may choose; else one


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
        judged: bool = False,
    ) -> None:
        """`patience_s`: how long a request may take. `number`: of the run. `judged`: answers get JUDGED's options."""
        self.headers, fields = layout.apart(number)
        super().__init__(layout.url, Options(0.0, ignore_eos=True), self.headers)
        self._own = {"model": MODEL, **fields}
        self._fields = [{**self._own, **(JUDGED if judged else KINDS)[kind]} for kind in kinds]
        self._words, self._patience_s = words, patience_s
        self._ids = {word: index for index, word in enumerate(words, NO_WORDS)}
        self.seen: dict[Key, Sample] = {}
        self.prompts: dict[Key, str] = {}
        self.why = ""  # the server did not tell how far a word is outside

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

    async def outside(self, text: str, word: str, allowed: int, seconds: float) -> float | None:
        """How far a word behind a text is outside of what the options allow, says the server. None: `why`."""
        body = {**self._own, "temperature": 0.0, "logit_bias": {str(self._ids.get(word)): BIAS}, "prompt": text}
        found, why = None, "no answer in time"
        with suppress(TimeoutError, httpx.TransportError, LookupError, TypeError, ValueError, AttributeError):
            async with asyncio.timeout(min(self._patience_s, seconds)):
                response = await self._http.post("/v1/completions", json={**body, **ONE})
            why = f"HTTP {response.status_code}: {response.text[:200]}"
            found = outside(response.json()["choices"][0]["logprobs"], word, allowed)
        self.why = why if found is None and seconds > 0 else self.why
        return found

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
        with suppress(TimeoutError):
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
