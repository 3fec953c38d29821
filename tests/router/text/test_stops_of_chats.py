"""A stop string ends an answer where the content has it, and nowhere else: in every format and API, however cut."""

import asyncio
import itertools
import json
import types
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import common_pb2, inference_pb2, worker_pb2
from millrace_router.flow.stream import AnswerText
from millrace_router.text.call_stream import CallDelta
from millrace_router.text.chat_format import ChatFormat, Style
from millrace_router.text.markers import DEEPSEEK, KIMI, THINK, THINK_END, StopMatcher
from millrace_router.text.message import MessageParser, ParsedOutput, joined
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.examples import examples
from router.fake_worker import PREFILL, FakeWorker
from router.harness import EOS, Cluster, events
from router.scripted import HELLO, TOOLS
from router.text.test_parsers import FORMS, OFFER, WEATHER

REASONING, CONTENT, AFTER = "\nFirst the sky.\n", "\n\nI look.\nNow", "Done. Bye"
CALLS = (("weather", WEATHER), ("time", "{}"))


class Form(NamedTuple):
    style: Style
    thinks: bool = False  # the model writes <think> itself
    kwargs: Mapping[str, bool] = types.MappingProxyType({})
    begun: bool = True  # the prompt has begun the reasoning

    def output(self, text: str) -> str:
        return (THINK if self.thinks else "") + text

    @property
    def reasons(self) -> bool:
        return self.thinks or self.begun


THINKING = {"thinking": True}
MODELS = {
    "v3": Form(Style.V3, begun=False),
    "r1": Form(Style.V3),
    "v31": Form(Style.V31, kwargs=THINKING),
    "v32": Form(Style.V32, kwargs=THINKING),
    "kimi": Form(Style.KIMI, thinks=True, begun=False),
}


class Case(NamedTuple):
    """What is left of an output of all parts with these stop strings."""

    stops: list[str]
    content: str
    calls: int
    stop: str = ""


ALL = Case(["☂"], "I look.\nNowDone. Bye", 2)
CASES = {
    "none": ALL,
    "reasoning": ALL._replace(stops=["sky", "First the sky."]),
    "border": ALL._replace(stops=["sky.\n" + THINK_END, THINK_END, "\n\nI", "sky.\n\n\nI look", "sky.I"]),
    "content": Case(["look"], "I ", 0, "look"),
    "all of the content": Case(["I look.\nNow"], "", 0, "I look.\nNow"),
    "of two the first": Case(["Now", ".\n", "sky"], "I look", 0, ".\n"),
    "before the calls": Case(["Now"], "I look.\n", 0, "Now"),
    "begins before the calls": ALL._replace(stops=["Now" + DEEPSEEK.calls, "Now\n\n<", "Now" + KIMI.calls, "Nowt"]),
    "the mark": ALL._replace(stops=[DEEPSEEK.calls, DEEPSEEK.call, "\n\n<", KIMI.calls, "<", "｜DSML｜"]),
    "name": ALL._replace(stops=["weather", "functions", "invoke", "time"]),
    "arguments": ALL._replace(stops=['{"city": "', "Oslo", "{", "}", '"', "[1, 2]", "city"]),
    "between the calls": ALL._replace(stops=["}" + DEEPSEEK.call_end, KIMI.call_end + KIMI.call, "```"]),
    "over the calls": ALL._replace(stops=["NowDone", "wD"]),
    "after the calls": Case(["Done. B"], "I look.\nNow", 2, "Done. B"),
    "at the end": Case(["Bye"], "I look.\nNowDone. ", 2, "Bye"),
    "begins at the end": ALL._replace(stops=["Bye!", "e\n"]),
}


def output_of(form: Form) -> str:
    reasoning = form.output(REASONING + THINK_END) if form.reasons else ""
    return reasoning + CONTENT.lstrip() + FORMS[form.style](*CALLS) + AFTER


def text_of(tokenizer: Tokenizer, form: Form, stops: Sequence[str], one_call: bool = False) -> AnswerText:
    parser = MessageParser(ChatFormat(form.style, reasons=True), thinking=form.begun, offer=OFFER)
    return AnswerText(tokenizer, parser, stops, one_call=one_call)


def read(text: AnswerText, pieces: list[list[int]]) -> tuple[ParsedOutput, int]:
    """All that was said, and the number of tokens that were used."""
    said, used = [], 0
    for piece in pieces:
        new, count = text.push(piece)
        said, used = [*said, new], used + count
        if text.stopped:
            break
    else:
        said.append(text.flush())
    return joined(said), used


def tokens_until(case: Case, tokenizer: Tokenizer, form: Form, ids: list[int]) -> int:
    """How many there are when the stop string is certain to be content: at its last character, or with the next token
    where that may begin a call's mark.
    """
    text, shown = text_of(tokenizer, form, ()), ""
    for count, token in enumerate(ids, 1):
        shown += text.push([token])[0].text
        if case.stop and shown.startswith(case.content + case.stop):
            mark = form.style is Style.V32 and case.stop.endswith("\n")
            assert tokenizer.decode(ids[: count - mark]).endswith(case.stop)
            return count
    assert not case.stop or text.flush().text
    return len(ids)


def named(calls: Sequence[CallDelta]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


EXPECTED_CALLS = [(name, json.loads(arguments)) for name, arguments in CALLS]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS)
def test_at_every_cut(model: str, case: str, tokenizers: dict[str, Tokenizer]) -> None:
    form, wanted, tokenizer = MODELS[model], CASES[case], tokenizers[model]
    ids = tokenizer._encode(output_of(form), add_bos=False)
    whole, used = read(text_of(tokenizer, form, wanted.stops), [ids])
    assert whole.reasoning == (REASONING.strip() if form.reasons else "")
    assert whole.text == wanted.content and named(whole.calls) == EXPECTED_CALLS[: wanted.calls]
    assert used == tokens_until(wanted, tokenizer, form, ids)
    for at in range(len(case) % 7, len(ids), 7):  # inside, push takes one token after the other
        text = text_of(tokenizer, form, wanted.stops)
        assert read(text, [ids[:at], ids[at:]]) == (whole, used) and text.stopped_by == wanted.stop
    assert read(text_of(tokenizer, form, wanted.stops), [[i] for i in ids]) == (whole, used)


@pytest.mark.parametrize("model", MODELS)
def test_the_first_call_ends_it_and_not_what_looks_like_its_end(model: str, tokenizers: dict[str, Tokenizer]) -> None:
    form, tokenizer = MODELS[model], tokenizers[model]
    junk = DEEPSEEK.call_end + KIMI.call_end
    output = output_of(form).replace("sky", junk).replace("Now", junk)
    ids = tokenizer._encode(output, add_bos=False)
    for pieces in ([ids], [[i] for i in ids]):
        text = text_of(tokenizer, form, (), one_call=True)
        said, used = read(text, pieces)
        assert named(said.calls) == EXPECTED_CALLS[:1] and said.text == CONTENT.lstrip().replace("Now", junk)
        assert used < len(ids) and text.stopped and not text.stopped_by
        assert said.reasoning.count(junk) == form.reasons


PIECES = [THINK, THINK_END, "a", "b", "ab", "\n\n", "\n", " ", "<", *(form(*CALLS) for form in FORMS.values())]
PIECES += [*DEEPSEEK, *KIMI, "｜DSML｜"]


@examples(50)
@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=12),
    stops=st.lists(st.text("ab\n<", min_size=1, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    model=st.sampled_from(sorted(MODELS)),
)
def test_equals_the_naive_cut_of_each_text_between_calls(
    parts: list[str], stops: list[str], cuts: list[int], model: str, tokenizers: dict[str, Tokenizer]
) -> None:
    form, tokenizer = MODELS[model], tokenizers[model]
    ids = tokenizer._encode("".join(parts), add_bos=False)
    at = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    whole, _ = read(text_of(tokenizer, form, ()), [ids])
    expected, stop = [], ""
    for part in whole.parts:
        shown, stop = naive(part, stops) if isinstance(part, str) else (part, "")
        expected.append(shown)
        if stop:
            break
    expected = ParsedOutput.of(whole.reasoning, [part for part in expected if part])
    text = text_of(tokenizer, form, stops)
    said, used = read(text, [ids[a:b] for a, b in itertools.pairwise(at)])
    assert joined([said, ParsedOutput()]) == joined([expected, ParsedOutput()]) and text.stopped_by == stop
    assert read(text_of(tokenizer, form, stops), [ids]) == (said, used)


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


# ------------------------------------------------------------------------------------------------- over the network


def say(made: Cluster, pieces: list[list[int]], ends: bool = True) -> None:
    """Both workers answer the next request with these outputs. Not `ends`: after them only an abort ends it."""

    async def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        first = 0
        for piece in pieces[:1] if worker.role == PREFILL else pieces:
            logprobs = [{"sampled": {"token_id": i, "logprob": -0.5}} for i in piece]
            finish = common_pb2.FINISH_REASON_STOP if ends and first + len(piece) == sum(map(len, pieces)) else 0
            yield worker_pb2.SequenceOutput(
                id=request.id, first_index=first, token_ids=piece, logprobs=logprobs, finish_reason=finish
            )
            first += len(piece)
        if not ends and worker.role != PREFILL:
            await asyncio.Event().wait()

    for worker in (made.prefills[0], made.decodes[0]):
        worker.script.append(behave)


class Told(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    finish: str
    tokens: int
    entries: int  # of logprobs


async def streamed(made: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await made.direct.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return events(answer.text)


async def chat(made: Cluster, form: Form, stops: list[str], stream: bool) -> Told:
    body = {"messages": HELLO, "tools": TOOLS, "stop": stops[:16], "chat_template_kwargs": dict(form.kwargs)}
    body |= {"logprobs": True, "stream_options": {"include_usage": True}} if stream else {"logprobs": True}
    if not stream:
        (answer,) = [(await made.direct.post("/v1/chat/completions", json=body)).json()]
        (choice,) = answer["choices"]
        message, calls = choice["message"], choice["message"].get("tool_calls", [])
        functions = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        reasoning, content, finish = message.get("reasoning_content", ""), message["content"] or "", choice
    else:
        chunks = await streamed(made, "/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        texts: dict[int, list[str]] = {}
        for call in itertools.chain.from_iterable(delta.get("tool_calls", ()) for delta in deltas):
            texts.setdefault(call["index"], [call["function"].get("name", ""), ""])[1] += call["function"]["arguments"]
        functions = [(name, json.loads(arguments)) for name, arguments in texts.values()]
        *_, finish, answer = [chunk["choices"][0] if chunk["choices"] else chunk for chunk in chunks]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        finish = finish | {"logprobs": {"content": entries}}
    count = len(finish["logprobs"]["content"])
    return Told(reasoning, content, functions, finish["finish_reason"], answer["usage"]["completion_tokens"], count)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", ["r1", "v32"])  # every other one is cut alike
async def test_what_clients_read(model: str, stream: bool, serve: Callable) -> None:
    """Over the Messages API: test_anthropic.py."""
    made, form = await serve(model), MODELS[model]
    tokenizer = made.router.inference.tokenizer
    ids = tokenizer._encode(output_of(form) + EOS, add_bos=False)
    cuts = itertools.cycle([[[i] for i in ids], [ids[:40], ids[40:-9], ids[-9:]], [ids[:1], ids[1:]]])
    for (name, wanted), pieces in zip(CASES.items(), cuts, strict=False):
        say(made, pieces)
        told = await chat(made, form, wanted.stops, stream)
        assert told.reasoning == (REASONING.strip() if form.reasons else ""), name
        assert told.content == wanted.content, name
        assert told.calls == EXPECTED_CALLS[: wanted.calls], name
        assert told.finish == ("tool_calls" if wanted.calls else "stop"), name
        assert told.tokens == told.entries == tokens_until(wanted, tokenizer, form, ids), name
    await made.quiet()


async def test_a_stop_string_aborts_the_workers_with_its_last_token(serve: Callable) -> None:
    made = await serve("v31")
    encode = made.router.inference.tokenizer._encode
    for text in ("Sky.</think>One, two", "Two.</think>One sky, two"):
        say(made, [[i] for i in encode(text, add_bos=False)], ends=False)
    body = {"messages": HELLO, "stop": ["sky", " two"], "n": 2, "chat_template_kwargs": THINKING, "min_tokens": 64}
    answer = (await made.direct.post("/v1/chat/completions", json=body | {"stop_token_ids": [250]})).json()
    told = [(choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
    assert told == [("One,", "stop"), ("One ", "stop")]
    await made.quiet()
    assert len(made.decodes[0].aborted) == 2


async def test_plain_text_has_no_reasoning(serve: Callable) -> None:
    """Over gRPC, for chats too, and in completions the stop strings are for all of the text."""
    made = await serve("v31")
    encode = made.router.inference.tokenizer._encode
    ids = encode(output_of(MODELS["v31"]), add_bos=False)
    say(made, [[i] for i in ids], ends=False)
    prompt, sampling = inference_pb2.Prompt(chat={"messages": HELLO}), common_pb2.SamplingParams(max_tokens=400)
    request = inference_pb2.GenerateRequest(prompt=prompt, stop=["sky"], sampling=sampling)
    responses = [response async for response in made.stub.Generate(request)]
    assert "".join(response.text for response in responses) == "\nFirst the "
    assert responses[-1].usage.completion_tokens == len(encode("\nFirst the sky", add_bos=False))
    say(made, [ids], ends=False)
    body = {"prompt": "Weather?", "stop": ["Oslo", "zzz"], "max_tokens": 400}
    (choice,) = (await made.direct.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == output_of(MODELS["v31"]).partition("Oslo")[0] and choice["finish_reason"] == "stop"
    await made.quiet()


# ------------------------------------------------------------------------------------- stop strings


def naive(text: str, stops: list[str]) -> tuple[str, str]:
    """Character by character: the first moment at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def run(pieces: list[str], stops: list[str]) -> tuple[str, str]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.matched


letters = st.text("ab", max_size=12)


@examples(100)
@given(st.lists(letters, max_size=8), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_equals_naive_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == naive("".join(pieces), stops)
    assert run(list("".join(pieces)), stops) == naive("".join(pieces), stops)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_nothing_is_shown_that_a_stop_string_takes_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for character in text:
        shown += matcher.push(character)
        assert naive(text, stops)[0].startswith(shown)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_withheld_than_needed(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    held = text[len(shown) :] if not matcher.matched else ""
    assert held == "" or any(stop.startswith(held) for stop in stops)
