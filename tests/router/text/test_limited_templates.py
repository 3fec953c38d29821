"""Templates that fail, never end, or write without bounds: refused at the start, or by the request that meets them."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from millrace_common.config import ConfigError
from millrace_common.reasons import Reason
from millrace_router.text import limited_template
from millrace_router.text.limited_template import CPU_S, LimitedEnvironment, LimitedTemplate, TooMuch
from millrace_router.text.tokenizer import V32_TEMPLATE, Tokenizer
from millrace_rpc.errors import MillraceError
from router.harness import TEMPLATE, write_tokenizer
from router.test_main import launch

from router import templates

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


class Ticks:
    """Each look at it takes a hundredth of the time that a rendering has."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += CPU_S / 100
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renderings end behind a few rounds, on however slow a machine."""
    monkeypatch.setattr(limited_template, "MOST_CHARACTERS", 1 << 20)
    made = LimitedEnvironment.__init__
    monkeypatch.setattr(LimitedEnvironment, "__init__", lambda self, **options: made(self, Ticks(), **options))


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
        with pytest.raises(MillraceError, match="the chat template refused") as caught:
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


def test_each_rendering_has_its_own_time() -> None:
    times = itertools.count(0.0, CPU_S / 4)
    environment = LimitedEnvironment(lambda: next(times))
    few = LimitedTemplate(environment, "{% for x in range(50) %}{{ x }}{% endfor %}")
    many = LimitedTemplate(environment, "{% for x in range(500) %}{{ x }}{% endfor %}")
    for _ in range(5):
        assert few.render() == "".join(map(str, range(50)))
        with pytest.raises(TooMuch, match="it takes longer than 4 s"):
            many.render()


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


async def test_the_process_ends_with_a_line_and_exit_code_2(tmp_path: Path) -> None:
    process = await launch("--set", f"model={write_tokenizer(tmp_path, ENDLESS_OF_TEXT['a text, multiplied'])}")
    _, stderr = await process.communicate()
    [line] = stderr.decode().splitlines()
    assert process.returncode == 2 and line.startswith("millrace router: model: ")
    said = "the chat template cannot be used: it makes a text of more than 134,217,728 characters"
    assert line.endswith(said)
