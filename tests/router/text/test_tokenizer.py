"""Texts and tokens, and templates that fail, never end, or write without bounds."""

import json
import random
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from millrace_common.config import ConfigError
from millrace_common.reasons import Reason
from millrace_router.flow.stream import AnswerText
from millrace_router.text import limited_template
from millrace_router.text.limited_template import CPU_S, LimitedEnvironment, LimitedTemplate, TooMuch
from millrace_router.text.message import MessageParser, ParsedOutput
from millrace_router.text.tokenizer import LONG_TEXT, V32_TEMPLATE, Tokenizer
from millrace_rpc.errors import MillraceError
from millrace_testing.examples import examples
from router.harness import BOS, EOS, TEMPLATE, write_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders

from router import templates


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> HfTokenizer:
    return HfTokenizer.from_file(str(model_folder / "tokenizer.json"))


async def test_long_texts_are_encoded_the_same(tokenizer: Tokenizer) -> None:
    text = "hello " * LONG_TEXT
    assert tokenizer.decode(await tokenizer.encode(text, add_bos=True)) == text


@examples(60)
@given(st.text())
def test_a_text_is_the_same_behind_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer._encode(text, add_bos=True)
    assert tokenizer.decode(ids, keep_special=True) == BOS + text


@examples(80)
@given(st.lists(st.integers(0, 260), max_size=30), st.booleans(), st.integers(1, 5))
def test_incremental_equals_whole_for_any_ids(
    tokenizer: Tokenizer, reference: HfTokenizer, ids: list[int], keep: bool, piece: int
) -> None:
    """Also for bytes that are no UTF-8: the tokenizers library's own answer, whatever the pieces."""
    stream = AnswerText(tokenizer, MessageParser.of_plain_text(), keep_special=keep)
    text = "".join(stream.push(ids[i : i + piece])[0].text for i in range(0, len(ids), piece)) + stream.flush().text
    assert text == tokenizer.decode(ids, keep) == reference.decode(ids, skip_special_tokens=not keep)


def test_a_character_appears_when_its_last_byte_does(tokenizer: Tokenizer) -> None:
    ids, stream = tokenizer._encode("é🚀", add_bos=False), AnswerText(tokenizer, MessageParser.of_plain_text())
    assert [stream.push([i])[0].text for i in ids] == ["", "é", "", "", "", "🚀"]
    assert stream.push(ids[:1]) == (ParsedOutput(), 1) and stream.flush().text == "\ufffd"


def test_stop_string_over_token_boundaries_and_inside_characters(tokenizer: Tokenizer) -> None:
    text = AnswerText(tokenizer, MessageParser.of_plain_text(), ["🚀b"])
    ids = tokenizer._encode("aé🚀bcd", add_bos=False)
    said, used = text.push(ids)
    assert said.text == "aé" and text.stopped_by and tokenizer.decode(ids[:used]) == "aé🚀b"


def test_template_that_refuses(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('first the user') }}{% endif %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, template))
    with pytest.raises(MillraceError, match="first the user") as caught:
        tokenizer.render([{"role": "system", "content": "x"}])
    assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.param == "messages"


@pytest.mark.parametrize("attack", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_template_is_sandboxed(tmp_path: Path, attack: str) -> None:
    with pytest.raises(ConfigError, match="the chat template cannot be used"):
        Tokenizer.load(write_tokenizer(tmp_path, attack))


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError, match="template cannot be used"):
        Tokenizer.load(write_tokenizer(tmp_path, "{% if %}"))
    write_tokenizer(tmp_path)
    other = HfTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    other.decoder = decoders.Fuse()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="Fuse"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "no usable tokenizer"),
        ({"chat_template": [{"name": "default", "template": "x"}]}, "the chat template must be text, not list"),
        ({"bos_token": 1}, "a token that is not text: 1"),
        ({"eos_token": {"content": []}}, "a token that is not text"),
    ],
)
def test_malformed_configurations_of_tokenizers(config: object, words: str, tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"no usable chat template: .* can't decode"):
        Tokenizer.load(tmp_path)


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos is None
    with pytest.raises(MillraceError, match="no chat template"):
        tokenizer.render([])


# ------------------------------------------------------------------------------------- templates that fail or never end


BIG = "{% for a in range(90000) %}{% for b in range(90000) %}"
ENDS = "{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": f"{BIG}{{% set x = a + b %}}{ENDS}",
    "loops that write nothing": f"{BIG}{ENDS}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks": "".join(
        f"{{% block b{n} %}}{{{{ self.b{n + 1}() }}}}{{{{ self.b{n + 1}() }}}}{{% endblock %}}" for n in range(60)
    )
    + "{% block b60 %}{% endblock %}",
    "a recursive loop": "{% for x in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "bodies of calls": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 60
    + "{% endcall %}" * 60,
}
ENDLESS_OF_TEXT = {
    "text in loops": f"{BIG}{'x' * 1000}{ENDS}",
    "values in loops": f"{BIG}{{{{ messages[0].content * 1000 }}}}{ENDS}",
    "a macro's text": f"{{% macro m() %}}{BIG}{'x' * 1000}{ENDS}{{% endmacro %}}{{% set x = m() %}}",
    "a text, doubled": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a text, joined": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a text, multiplied": "{{ 'x' * 10 ** 12 }}",
    "multiplied by a text": "{{ 10 ** 12 * 'x' }}",
    "a list": "{% set x = [0] * 10 ** 12 %}",
    "a list, doubled": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a power": "{% set x = 10 ** 10000000 %}",
    "a square of squares": "{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
}
BROKEN = {
    "division": "{{ 1 / 0 }}",
    "syntax": "{% if %}",
    "filter": "{{ messages | nothing }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "text": "{{ lipsum(10 ** 9) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "depth of loops": "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "depth of brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "another template": "{% include 'other' %}",
    "keys": "{{ messages[0]['a']['b'] }}",
}


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock takes a hundredth of a rendering's time: renderings end behind a few rounds."""
    monkeypatch.setattr(limited_template, "MOST_CHARACTERS", 1 << 20)
    made = LimitedEnvironment.__init__
    clock = count(0, CPU_S / 100).__next__
    monkeypatch.setattr(LimitedEnvironment, "__init__", lambda self, **options: made(self, clock, **options))


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("name", [*ENDLESS, *ENDLESS_OF_TEXT, *BROKEN])
def test_a_start_refuses_it_in_a_line(name: str, tmp_path: Path) -> None:
    template = (ENDLESS | ENDLESS_OF_TEXT | BROKEN)[name]
    folder = write_tokenizer(tmp_path, template)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(folder)
    message = str(caught.value)
    assert message.startswith(f"model: {folder / 'tokenizer_config.json'}: the chat template cannot be used: ")
    assert "\n" not in message and len(message) < 1000
    if name in ENDLESS:
        assert message.endswith("it takes longer than 4 s of CPU time")


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("name", [*ENDLESS, *ENDLESS_OF_TEXT, "division", "range", "recursion", "keys"])
def test_a_request_that_meets_it_is_refused_and_the_next_one_is_served(name: str, tmp_path: Path) -> None:
    """Blocks are always rendered, so a chat that meets them is like the others."""
    if name == "blocks":
        return
    template = (ENDLESS | ENDLESS_OF_TEXT | BROKEN)[name]
    macro, _, call = template.rpartition("{% endmacro %}")
    when = f"{macro}{'{% endmacro %}' if macro else ''}{{% if messages[0].content == 'now' %}}{call}{{% endif %}}hi"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, when))
    for _ in range(2):
        with pytest.raises(MillraceError, match="refused by the chat template") as caught:
            tokenizer.render([{"role": "user", "content": "now"}])
        assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.param == "messages"
        assert tokenizer.render([{"role": "user", "content": "later"}]) == "hi"


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as a few of the longest texts."""
    monkeypatch.setattr(limited_template, "MOST_CHARACTERS", most := 1 << 20)
    environment = LimitedEnvironment(lambda: 0.0)
    for name in set(ENDLESS_OF_TEXT) - {"a list", "a list, doubled"}:
        template = LimitedTemplate(environment, ENDLESS_OF_TEXT[name])
        tracemalloc.start()
        with pytest.raises(TooMuch):
            template.render(messages=[{"role": "user", "content": "a"}])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 * most, (name, peak)


PUBLISHED: dict[str, str] = {
    name: text for name, text in vars(templates).items() if name.isupper() and isinstance(text, str) and "{%" in text
}


@pytest.mark.parametrize("name", ["tiny", "v32", *PUBLISHED])
def test_what_published_templates_write_is_not_changed(name: str) -> None:
    """Chats of all kinds, beside the environment of which ours is made."""
    source = PUBLISHED.get(name) or (TEMPLATE if name == "tiny" else V32_TEMPLATE.read_text())
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    ours, plain = LimitedEnvironment(**options), ImmutableSandboxedEnvironment(**options)
    for environment in (ours, plain):
        environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value)
        environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "now"}
    compiled = LimitedTemplate(ours, source), plain.from_string(source)
    rng, written = random.Random(name), 0
    for _ in range(100):
        chat = drawn(rng)
        found = [outcome(template.render, chat) for template in compiled]
        assert found[0] == found[1], chat
        written += found[0] is not None
    assert written > 10


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def outcome(render: Callable[..., str], chat: dict[str, Any]) -> str | None:
    try:
        return render(**chat)
    except Exception:
        return None


def drawn(rng: random.Random) -> dict[str, Any]:
    texts = ("", "a", "<b> & 'c'\n", "{{ x }}", "日本" * 40)
    call = {"id": "c:0", "type": "function", "function": {"name": "f", "arguments": rng.choice(("{}", '{"a": [1]}'))}}
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(texts)})
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": rng.choice(texts)})
        if rng.random() < 0.5:
            calls = {"tool_calls": [call] * rng.randrange(1, 3)} if rng.random() < 0.5 else {}
            messages.append({"role": "assistant", "content": rng.choice(texts), **calls})
            messages += [{"role": "tool", "tool_call_id": "c:0", "content": rng.choice(texts)}] * bool(calls)
    tools = rng.choice((None, [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]))
    switches = {"thinking": rng.random() < 0.5, "add_generation_prompt": rng.random() < 0.5}
    return {"messages": messages, "tools": tools, "bos_token": "<s>", "eos_token": "</s>", **switches}
