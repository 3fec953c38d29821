"""Workers with drafts, of equal and of different numbers, and workers without them say the same, and stand in for each
other. Greedy answers are those of transformers.

One fleet has three prefill workers (3, 1 and no drafts) and two decode workers (3 and no drafts). Beside its own
router, which may use any pair, each pair has a router that knows no other.
"""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

import httpx
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from millrace.v1 import admin_pb2, common_pb2
from millrace_bench.tasks import TASKS
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.client import Answer, Client, collect, until
from millrace_testing.cluster import ControlledCluster, MixedSpec
from millrace_testing.paths import TINY
from millrace_testing.reference import Continuation, assert_greedy, assert_same
from millrace_testing.rollout import retries
from millrace_testing.shared import shared

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

PAIRS = {3: ("prefill-0", "decode-0"), 1: ("prefill-1", "decode-0"), 0: ("prefill-2", "decode-1")}  # by handed drafts
SETTINGS = (
    "dtype=float32",
    "limits.checks=[canary, poison]",
    "limits.draft_batches=[8,4,2]",
    "timeouts.lease=3",
    # Small limits, and a stated number of pages, save seconds of every start.
    "limits.num_pages=120",
    "limits.max_model_len=512",
    "limits.max_prefill_tokens=128",
    "limits.max_running=16",
)
OWN = {"prefill-0": 3, "decode-0": 3, "prefill-1": 1}
SETS = {name: (f"limits.draft_tokens={drafts}",) for name, drafts in OWN.items()}
LENGTHS = (1, 64, 65, 200)  # of prompts of noise
TRAINED = {"copy": 2, "sort": 1, "chat": 1}  # prompts that the model was trained to answer: it is sure of most tokens
IN_GRAMMAR = 1  # the prompt whose answer is
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
)
WORDS = common_pb2.Grammar(regex=r"([a-z]{3,6}, ){20}end")  # far from over when its worker dies
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"enum": [7, 30, 120]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
Routers = dict[int, LocalCluster]  # by the pair's drafts
fleet = shared(lambda: ControlledCluster(MixedSpec(prefill=3, decode=2, worker_set=SETTINGS, own=SETS)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routers(fleet: ControlledCluster) -> AsyncIterator[Routers]:
    async with contextlib.AsyncExitStack() as stack:
        pairs = [json.dumps([fleet.address(name) for name in names]) for names in PAIRS.values()]
        specs = [ClusterSpec(prefill=0, decode=0, router_set=(f"workers={pair}",)) for pair in pairs]
        started = await asyncio.gather(*(stack.enter_async_context(LocalCluster(spec)) for spec in specs))
        yield dict(zip(PAIRS, started, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(routers: Routers) -> list[Answer]:
    """What the pair without drafts says."""
    async with client_of(routers[0]) as client:
        answers = await ask_all(client)
    assert not any(answer.usage.drafted_tokens for answer in answers)
    assert re.fullmatch(WORDS.regex, answers[IN_GRAMMAR].text)
    return answers


def client_of(cluster: LocalCluster) -> Client:
    return Client(cluster.grpc_address, cluster.admin_address)


@cache
def questions() -> list[str]:
    items = [item for task, count in TRAINED.items() for item in TASKS[task].items(0, count)]
    return [Tokenizer.load(TINY).render([message._asdict() for message in item.messages]) for item in items]


async def prompts() -> list[list[int]]:
    rng, tokenizer = random.Random(7), Tokenizer.load(TINY)
    noise = [[rng.randrange(10, 1000) for _ in range(length)] for length in LENGTHS]
    return noise + [await tokenizer.encode(text, add_bos=False) for text in questions()]


async def ask(client: Client, number: int, prompt: list[int], answer: Answer) -> Answer:
    """Answers end one after another, so that the number of sequences, and with it of drafts, changes."""
    options = {"max_tokens": 30 + 5 * number, "ignore_eos": True, "logprobs": 0, **SAMPLINGS[number % len(SAMPLINGS)]}
    if number == IN_GRAMMAR:
        options |= {"grammar": WORDS, "max_tokens": 400, "ignore_eos": False}
    async for chunk in client.stream(prompt, **options):
        collect(answer, chunk)
    return answer


async def ask_all(client: Client) -> list[Answer]:
    return await asyncio.gather(*(ask(client, i, prompt, Answer()) for i, prompt in enumerate(await prompts())))


def continuations(answers: Sequence[Answer]) -> list[Continuation]:
    return [Continuation(answer.tokens, answer.sampled) for answer in answers]


async def workers(client: Client, fleet: ControlledCluster) -> dict[str, admin_pb2.WorkerStatus]:
    """By name."""
    assert client.admin is not None
    seen = {
        worker.address: worker for worker in (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
    }
    return {name: seen[fleet.address(name)] for name in fleet.spec.workers() if fleet.address(name) in seen}


@pytest.mark.parametrize("handed", [3, 1])
async def test_drafts_change_no_token(
    handed: int, fleet: ControlledCluster, routers: Routers, plain: list[Answer]
) -> None:
    """The second time from the prefix cache."""
    given, step = await prompts(), len(SAMPLINGS)
    async with client_of(routers[handed]) as client:
        for answers in (await ask_all(client), await ask_all(client)):
            assert_same(continuations(answers), continuations(plain))
            assert_greedy(continuations(answers[::step]), given[::step])
            assert all(0 <= one.usage.accepted_draft_tokens <= one.usage.drafted_tokens for one in answers)
            assert sum(one.usage.accepted_draft_tokens for one in answers) > 0
        for prompt, answer in zip(given, answers, strict=True):
            assert answer.usage.cached_prompt_tokens >= (len(prompt) - 1) // 64 * 64
        await client.wait_whole()
        (load,) = (await workers(client, fleet))["decode-0"].load.replicas
    assert load.drafted[0] > load.drafted[1] > load.drafted[2] > 0, "the number of drafts was always the same"


@pytest.mark.parametrize("handed", PAIRS)
async def test_decode_worker_takes_the_drafts_of_the_prefill_worker(handed: int, routers: Routers) -> None:
    """Its first step verifies them: the second and the third token come of that step. Later drafts are good only with
    the prompt's KV of the MTP layer.
    """
    async with client_of(routers[handed]) as client:
        start = (await client.generate(questions()[0], max_tokens=3, ignore_eos=True)).usage
        whole = (await client.generate(questions()[0], max_tokens=40, ignore_eos=True)).usage
    assert (start.drafted_tokens, start.accepted_draft_tokens) == (handed, min(handed, 1))
    assert whole.accepted_draft_tokens >= whole.drafted_tokens / 2


async def test_openai_clients_see_the_same_choices_and_accepted_drafts(routers: Routers) -> None:
    asked = {"prompt": questions()[0], "max_tokens": 40, "n": 2, "temperature": 0.7, "seed": 4}

    async def told(handed: int) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=routers[handed].http_url, timeout=None) as http:
            return (await http.post("/v1/completions", json=asked)).json()

    drafted, without = await told(3), await told(0)
    assert [choice["text"] for choice in drafted["choices"]] == [choice["text"] for choice in without["choices"]]
    assert drafted["usage"]["completion_tokens"] == without["usage"]["completion_tokens"]
    assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert "accepted_prediction_tokens" not in (without["usage"].get("completion_tokens_details") or {})


async def test_grammars_and_stop_strings_end_an_answer_where_they_would_have(routers: Routers) -> None:
    async with client_of(routers[3]) as drafting, client_of(routers[0]) as without:
        grammar = common_pb2.Grammar(json_schema=json.dumps(SCHEMA))
        asked: list[dict[str, Any]] = [{"grammar": grammar, "max_tokens": 90, **sampling} for sampling in SAMPLINGS]
        text = (await without.generate(questions()[0], max_tokens=40, ignore_eos=True)).text
        stops = [text[start : start + 5] for start in range(4, 24, 5)]
        asked += [{"stop": [stop], "max_tokens": 40, "ignore_eos": True} for stop in stops]

        async def answers(client: Client) -> list[Answer]:
            return await asyncio.gather(*(client.generate(questions()[0], **options) for options in asked))

        found, expected = await answers(drafting), await answers(without)
    assert [(one.text, one.finish) for one in found] == [(one.text, one.finish) for one in expected]
    in_grammar, stopped = found[: len(SAMPLINGS)], found[len(SAMPLINGS) :]
    for one in in_grammar:
        Draft202012Validator(SCHEMA).validate(json.loads(one.text))
    assert all(one.finish == "stop" for one in found)
    assert [one.text for one in stopped] == [text[: text.index(stop)] for stop in stops]
    assert sum(one.usage.accepted_draft_tokens for one in in_grammar) > 0


async def test_workers_of_different_layouts_are_no_pair_and_both_pairs_serve(
    fleet: ControlledCluster, plain: list[Answer]
) -> None:
    async with client_of(fleet) as client:
        assert client.admin is not None
        listed = (await client.admin.ListWorkers(admin_pb2.ListWorkersRequest())).pairs
        names = {fleet.address(name): name for name in fleet.spec.workers()}
        assert {(names[pair.source], names[pair.worker]) for pair in listed} == set(PAIRS.values())
        before = await workers(client, fleet)
        assert_same(continuations(await ask_all(client)), continuations(plain))
        await client.wait_whole()
        after = await workers(client, fleet)
    for name in ("decode-0", "decode-1"):
        assert (
            after[name].load.replicas[0].counters["output_tokens"]
            > before[name].load.replicas[0].counters["output_tokens"]
        )


async def test_streams_go_on_in_the_other_pair_when_their_decode_worker_dies(
    fleet: ControlledCluster, plain: list[Answer]
) -> None:
    async with client_of(fleet) as client:
        await kill_in_the_middle(fleet, client, "decode-0", plain)
        left = await workers(client, fleet)
        assert {name for name, worker in left.items() if worker.routable} == set(PAIRS[0])
        assert "no worker of the other role with an equal KV layout" in left["prefill-0"].detail
        await fleet.restart("decode-0")
        await fleet.wait_routable()
        await kill_in_the_middle(fleet, client, "decode-1", plain)


async def kill_in_the_middle(fleet: ControlledCluster, client: Client, victim: str, plain: list[Answer]) -> None:
    answers, before = [Answer() for _ in plain], await retries(fleet, "WORKER_LOST")
    given = enumerate(zip(await prompts(), answers, strict=True))
    tasks = [asyncio.create_task(ask(client, i, prompt, answer)) for i, (prompt, answer) in given]
    # Not "each": where the other pair is slow, all of the victim's streams could have ended by then.
    await until(lambda: any(len(answer.tokens) >= 8 for answer in answers), what="8 tokens of one")
    await fleet.kill(victim)
    await asyncio.gather(*tasks)
    assert_same(continuations(answers), continuations(plain))
    assert await retries(fleet, "WORKER_LOST") - before >= 1
