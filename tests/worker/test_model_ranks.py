"""A model over several ranks: tensor-parallel and data-parallel workers say what a single rank says, also where a
grammar restricts it: a rank that took another token than its leader would have other KV from then on, and so would
give every later log-probability a part that is wrong.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.paths import TINY
from millrace_testing.procs import workers
from millrace_testing.reference import Continuation, assert_same
from tokenizers import Tokenizer
from worker.test_profiling import operators

MODEL = (f"model={TINY}", "limits={num_pages: 129, max_model_len: 512, max_prefill_tokens: 128}")
PROMPTS = [[10 + (7 * i + n) % 500 for i in range(n)] for n in (3, 64, 200)]
REGEX = r"[A-Z][a-z]{4,9}( [a-z]{3,8}){3} is [0-9]{3}!"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["up", "down"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
GRAMMARS = (
    (common_pb2.Grammar(regex=REGEX), {"temperature": 1.0, "seed": 7}),
    (common_pb2.Grammar(json_schema=json.dumps(SCHEMA | {"additionalProperties": False})), {"temperature": 0.0}),
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[Continuation]:
    async def run() -> list[Continuation]:
        async with workers(tmp_path_factory.mktemp("one"), "unified", sets=MODEL) as [one], FakeLink(one) as link:
            return await generate(link)

    found = asyncio.run(run())
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    matched, valid = (tokenizer.decode(one.tokens) for one in found[len(PROMPTS) :])
    assert re.fullmatch(REGEX, matched) and json.loads(valid).keys() == SCHEMA["properties"].keys()
    return found


def requests() -> list[worker_pb2.EngineRequest]:
    free = [request(prompt, max_tokens=12, logprobs=0) for prompt in PROMPTS]
    fields = {"max_tokens": 60, "logprobs": 0, "ignore_eos": False}
    return free + [request(PROMPTS[0], grammar=grammar, **fields, **sampling) for grammar, sampling in GRAMMARS]


async def generate(link: FakeLink) -> list[Continuation]:
    batch = requests()
    for r in batch:
        link.submit(r)
    return [await said(link, r) for r in batch]


async def said(link: FakeLink, r: worker_pb2.EngineRequest) -> Continuation:
    await link.finish(r, timeout_s=60)
    return Continuation(link.tokens(r), [token.sampled.logprob for output in link.of(r) for token in output.logprobs])


@pytest.mark.long
async def test_replicas_that_share_a_prompt_hand_it_over(tmp_path: Path, reference: list[Continuation]) -> None:
    async with (
        workers(tmp_path, "prefill", sets=(*MODEL, "dp=2", "limits.context_parallel_tokens=60")) as [prefill],
        workers(tmp_path, "decode", sets=MODEL) as [decode],
        FakePair(prefill, decode) as both,
    ):
        batch = [both.submit(r) for r in requests()]
        assert_same([await said(both.to_decode, r) for r in batch], reference)
        await prefill.whole()
        await decode.whole()


@pytest.mark.long
async def test_tensor_parallel_ranks_hand_over_rank_by_rank(tmp_path: Path, reference: list[Continuation]) -> None:
    """Also between workers that have sharded their experts in the two ways that there are."""
    sets = (*MODEL, "tp=2", f"profile_dir={tmp_path / 'traces'}")
    async with (
        workers(tmp_path, "prefill", sets=(*sets, "expert_tp=true")) as [prefill],
        workers(tmp_path, "decode", sets=sets) as [decode],
    ):
        async with FakePair(prefill, decode) as both:
            await decode.stub.StartProfile(worker_pb2.StartProfileRequest(), timeout=20)
            batch = [both.submit(r) for r in requests()]
            assert_same([await said(both.to_decode, r) for r in batch], reference)
        traces = (await decode.stub.StopProfile(worker_pb2.StopProfileRequest(), timeout=60)).paths
        assert len(traces) == 2 and all("aten::mm" in operators(Path(trace)) for trace in traces)
        answer = await decode.stub.FreezeGc(worker_pb2.FreezeGcRequest(), timeout=20)
        assert answer.processes == 3
        await prefill.whole()
        await decode.whole()
