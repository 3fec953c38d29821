"""Answers of the trained model through prefill -> decode are in their grammar, however they are sampled and whoever
dies.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from millrace.v1 import admin_pb2, common_pb2
from millrace_cli.cluster import ClusterSpec
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from millrace_testing.client import Answer, Client, collect, until
from millrace_testing.cluster import ControlledCluster

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 3},
        "sky": {"enum": ["clear", "cloudy"]},
    },
    "required": ["city", "days", "sky"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,8} is [0-9]{3}\.[0-9]{2}( km| miles)!"
LONG = r"([a-z]{3,6}, ){30}end"  # far from over when its worker dies
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.7, "seed": 8, "top_p": 0.9}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ControlledCluster]:
    # A worker warms up with prompts of a whole step: small ones save seconds.
    limits = ("limits.checks=[canary, poison]", "limits.max_prefill_tokens=512")
    async with ControlledCluster(ClusterSpec(prefill=1, decode=2, worker_set=limits)) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: ControlledCluster) -> AsyncIterator[Client]:
    async with Client(cluster.grpc_address, cluster.admin_address) as client:
        yield client


async def test_json_always_satisfies_its_schema(cluster: ControlledCluster, client: Client) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as http:
        ask = {"model": "", "messages": [{"role": "user", "content": "Weather?"}], "response_format": FORMAT, "n": 2}
        answers = await asyncio.gather(*(http.chat.completions.create(**ask, **fields) for fields in SAMPLINGS * 2))
    for choice in (choice for answer in answers for choice in answer.choices):
        Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))
        assert choice.finish_reason == "stop"
    texts = [tuple(choice.message.content for choice in answer.choices) for answer in answers]
    assert texts[:3] == texts[3:] and len(set(texts)) == 3
    assert [len(set(choices)) for choices in texts[:3]] == [1, 2, 2], "greedy ones are alike, seeds differ"
    await client.wait_whole()


async def test_regex_is_matched_beside_requests_without_one(client: Client) -> None:
    grammar = common_pb2.Grammar(regex=REGEX)
    free = [client.generate("Hello", max_tokens=30, ignore_eos=True) for _ in range(3)]
    answers = await asyncio.gather(*free, *(client.generate("Far?", grammar=grammar, **s) for s in SAMPLINGS))
    for answer in answers[3:]:
        assert re.fullmatch(REGEX, answer.text) and answer.finish == "stop"
    assert len({answer.text for answer in answers[:3]}) == 1 and len(answers[0].tokens) == 30
    await client.wait_whole()


async def test_thoughts_are_free_until_they_end(client: Client) -> None:
    """The first token of the free answer stands for the end of the thoughts; the grammar follows it."""
    (mark, *_) = (await client.generate("Hello", max_tokens=4)).tokens
    grammar = common_pb2.Grammar(regex="(yes|no)", after_token_id=mark)
    answer = await client.generate("Hello", max_tokens=40, grammar=grammar)
    assert answer.tokens[0] == mark and answer.text.endswith(("yes", "no")) and answer.finish == "stop"


async def test_what_cannot_be_compiled_is_refused_before_any_work(cluster: ControlledCluster, client: Client) -> None:
    bad = {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}
    async with httpx.AsyncClient(base_url=cluster.http_url) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "response_format": bad, "stream": True})
    assert answer.status_code == 400 and "at #/type: must be one or more of" in answer.json()["error"]["message"]
    for grammar in (common_pb2.Grammar(regex="("), common_pb2.Grammar()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate("x", grammar=grammar)
        assert from_rpc_error(caught.value).reason is Reason.INVALID_ARGUMENT
    await client.wait_whole()


async def test_worker_dies_in_the_middle(cluster: ControlledCluster, client: Client) -> None:
    """The other decode worker goes on behind what was said, with the tokens that would have come. The last test: it
    leaves a worker less.
    """
    options = {"grammar": common_pb2.Grammar(regex=LONG), "max_tokens": 400, "temperature": 1.0, "seed": 7}
    expected = await client.generate("Words", **options)
    assert re.fullmatch(LONG, expected.text)
    answer = Answer()

    async def read() -> None:
        async for chunk in client.stream("Words", **options):
            collect(answer, chunk)

    task = asyncio.create_task(read())
    await until(lambda: len(answer.tokens) >= 10, what="10 tokens")
    await cluster.kill(await busy_decoder(cluster, client))
    await task
    assert (answer.tokens, answer.text) == (expected.tokens, expected.text)


async def busy_decoder(cluster: ControlledCluster, client: Client) -> str:
    assert client.admin is not None
    workers = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=60)).workers
    busy = {worker.address for worker in workers if worker.in_flight}
    return next(name for name in ("decode-0", "decode-1") if cluster.address(name) in busy)
