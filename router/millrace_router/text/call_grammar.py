"""Tool calls as a grammar of llguidance: what a model may write when calls must be right.

Every text that the grammar allows is read by the parsers of this package as the calls that it was made for, and their
arguments satisfy the tools' schemas. Marks that are tokens are named by their ids; then the workers keep ordinary
tokens from spelling them (`marks`). Marks that the vocabulary does not have are text.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from millrace.v1 import common_pb2
from millrace_common.grammar import pattern
from millrace_common.grammar.schema import Refused, normal
from millrace_common.grammar.source import GrammarError, inline, terminal

from millrace_router.text import dsml
from millrace_router.text.chat_format import Style, Tool, around_arguments, list_of_calls
from millrace_router.text.dsml_grammar import Parameters
from millrace_router.text.markers import DEEPSEEK, DSML, KIMI

ANY_ARGUMENTS = {"type": "object"}
_MARKS = {Style.KIMI: tuple(KIMI), Style.V32: (DSML,), Style.V3: tuple(DEEPSEEK), Style.V31: tuple(DEEPSEEK)}


class Calls(NamedTuple):
    """`required`: calls and no text; else `answer`, or any text, may stand in their place, and text before them.
    A tool that is neither required nor strict gets any object.
    """

    style: Style
    tools: tuple[Tool, ...]
    required: bool
    parallel: bool
    answer: common_pb2.Grammar | None = None


def call_grammar(calls: Calls, token_of: Callable[[str], int | None]) -> common_pb2.Grammar:
    """Raises GrammarError. May take long: a thread is the place for it. `calls` has schemas that compile.

    Args:
        token_of: the id of an added token.
    """
    rules = _Rules(calls.style, token_of)
    made = common_pb2.Grammar(lark=rules.grammar(calls))
    made.marks.extend(mark for mark in _MARKS[calls.style] if token_of(mark) is not None)
    if calls.style is Style.KIMI and (mark := token_of(KIMI.calls)) is not None:
        made.forbidden_before.append(mark)  # there calls end the reasoning
    return made


class _Rules:
    def __init__(self, style: Style, token_of: Callable[[str], int | None]) -> None:
        self._style = style
        self._token_of = token_of
        self._lines: list[str] = []

    def grammar(self, calls: Calls) -> str:
        begin, separator, end = list_of_calls(self._style)
        tools = [f"call{i}" for i in range(len(calls.tools))]
        for name, tool in zip(tools, calls.tools, strict=True):
            self._call(name, tool, separator, calls.required or tool.strict)
        self._rule("call", " | ".join(tools))
        self._rule("next", " | ".join(f"{name}next" for name in tools))
        self._rule("calls", f"call {'next* ' if calls.parallel else ''}{self.text(end)}")
        first, rest = self._opening(begin)
        if calls.required:
            gap = pattern.literal(dsml.GAP) if self._style is Style.V32 else ""
            self._rule("start", f"{terminal(gap + first)} {rest} calls")
        elif calls.answer is not None:
            gap = f"(?:{pattern.literal(dsml.GAP)})?" if self._style is Style.V32 else ""
            self._rule("start", f"{terminal(gap + first)} {rest} calls | answer")
            self._answer(calls.answer)
        else:
            free = pattern.ANY if rest else pattern.without([begin])
            self._rule("start", f'"" | TEXT | {"" if first else f"{rest} calls | "}HEAD {rest} calls')
            self._rule("TEXT", terminal(free))
            self._rule("HEAD", terminal(free + first))
        return "\n".join(self._lines)

    def text(self, text: str) -> str:
        """As parts of a rule."""
        parts: list[str] = []
        while text:
            found = min(((text.find(mark), mark) for mark in self._tokens() if mark in text), default=(len(text), ""))
            if found[0]:
                parts.append(terminal(pattern.literal(text[: found[0]])))
            if found[1]:
                parts.append(f"<[{self._token_of(found[1])}]>")
            text = text[found[0] + len(found[1]) :]
        return " ".join(parts)

    def _tokens(self) -> list[str]:
        return [mark for mark in _MARKS[self._style] if self._token_of(mark) is not None]

    def _opening(self, begin: str) -> tuple[str, str]:
        """What begins the calls: an expression, and what follows it from the first special token on."""
        at = min((begin.find(mark) for mark in self._tokens() if mark in begin), default=len(begin))
        return pattern.literal(begin[:at]), self.text(begin[at:])

    def _rule(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def _call(self, name: str, tool: Tool, separator: str, kept: bool) -> None:
        """The rules of a first call and of a next one: text between two special tokens is one lexeme."""
        begin, end = around_arguments(tool.name, self._style)
        self._rule(name, f"{self.text(begin)} {name}body")
        self._rule(f"{name}next", f"{self.text(separator + begin)} {name}body")
        try:
            schema, _ = normal(tool.parameters if kept else ANY_ARGUMENTS, is_object=True)
            if self._style is Style.V32:
                self._rule(f"{name}body", f"{name}args {self.text(end)}")
                self._lines += Parameters(name, schema, self.text).rules
                return
        except Refused as error:
            raise GrammarError(f"the parameters of {tool.name} cannot be kept {error}") from error
        number = f"{terminal('[0-9]{1,9}')} {self.text(KIMI.sep)} " if self._style is Style.KIMI else ""
        self._rule(f"{name}body", f"{number}{name}args {self.text(end)}")
        self._rule(f"{name}args", inline(schema))

    def _answer(self, answer: common_pb2.Grammar) -> None:
        kind = answer.WhichOneof("kind")
        assert kind is not None, "validate.py has checked it"
        given = getattr(answer, kind)
        try:
            made = terminal(pattern.whole(given)) if kind == "regex" else inline(normal(json.loads(given))[0])
        except (Refused, pattern.PatternError) as error:
            raise GrammarError(str(error)) from error
        self._rule("answer", made)
