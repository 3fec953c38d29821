"""Chat templates as programs of strangers: each rendering ends within its time, and makes no text without bounds.

Python cannot end a thread, so the template ends itself. Whatever may repeat (loops, macros, blocks) looks at the time
and at the length of what was written, and each operator that makes a longer text looks at that length first. What one
filter makes of one value is not bounded.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

CPU_S = 4.0  # of the thread; 40,000 turns, as many as 131,072 tokens may have, take about 1 s
MOST_CHARACTERS = 1 << 27  # written, those of macros once more where their text is; and of any one text
MOST_BITS = 1 << 16  # of a whole number
MOST_ITEMS = 1 << 20  # of a list
ROUNDS = 16  # between two looks at the clock
SEQUENCES = (str, list, tuple)


class TooMuch(jinja2.TemplateError):
    """The template takes longer, or writes more, than any prompt needs."""


class LimitedTemplate:
    def __init__(self, environment: "LimitedEnvironment", source: str) -> None:
        """Raises jinja2.TemplateError for a source that is no template."""
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError:
            raise
        except Exception as error:  # for example too deep for Python's compiler
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error

    def render(self, *args: object, **kwargs: object) -> str:
        """Raises jinja2.TemplateError, and nothing else."""
        budget = self._environment.budget
        budget.start()
        try:
            return self._template.render(*args, **kwargs)
        except jinja2.TemplateError:
            raise
        except Exception as error:  # of any line of it
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error
        finally:
            budget.stop()


class TemplateBudget(threading.local):
    """What is left for the rendering of this thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = False

    def start(self) -> None:
        self._running, self._end = True, self._clock() + CPU_S
        self._characters, self._rounds = MOST_CHARACTERS, 0

    def stop(self) -> None:
        self._running = False

    def spend(self, characters: int) -> None:
        """Raises TooMuch."""
        if self._running:  # the compiler tries what is constant
            self._characters -= characters
            if self._characters < 0:
                raise TooMuch(f"it writes more than {MOST_CHARACTERS:,} characters")

    def round(self, characters: int) -> None:
        """Raises TooMuch."""
        self.spend(characters)
        self._rounds += 1
        if not self._rounds % ROUNDS and self._clock() >= self._end:
            raise TooMuch(f"it takes longer than {CPU_S:g} s of CPU time")


Repeating = nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block
Value = Any  # of a template's expression


class _Rounds(NodeTransformer):
    """Has every round of what repeats spend what it writes itself, and every concatenation spend its length."""

    def visit_repeating(self, node: Repeating) -> Repeating:
        self.generic_visit(node)
        text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        spend = nodes.Call(nodes.EnvironmentAttribute("round"), [nodes.Const(text)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(spend))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = visit_repeating

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenated"), node.nodes, [], None, None)


class _Generator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        super().visit_Template(_Rounds().visit(node), frame)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})
    code_generator_class = _Generator

    def __init__(self, clock: Callable[[], float] = time.thread_time, **options: Any) -> None:  # jinja2's own
        """`clock`: seconds that this thread has had; other threads and processes take none of a rendering's."""
        self.budget = TemplateBudget(clock)
        self.round = self.budget.round  # for templates
        super().__init__(finalize=self._written, **options)
        self.binop_table.update({"+": _sum, "*": _product, "**": _power})
        del self.globals["lipsum"]  # any amount of text

    def concatenated(self, *parts: object) -> str:
        texts = [str(part) for part in parts]
        _check("", sum(map(len, texts)))
        return "".join(texts)

    def _written(self, value: object) -> object:
        if isinstance(value, str):
            self.budget.spend(len(value))
        return value


def _check(kind: object, size: int) -> None:
    """`size`: of a value of the kind of this one, which an operator is about to make."""
    most, unit = MOST_ITEMS, "items"
    if isinstance(kind, str):
        most, unit = MOST_CHARACTERS, "characters"
    elif isinstance(kind, int):
        most, unit = MOST_BITS, "bits"
    if size > most:
        raise TooMuch(f"it makes a value of more than {most:,} {unit}")


def _sum(left: Value, right: Value) -> Value:
    if isinstance(left, SEQUENCES) and isinstance(right, SEQUENCES):
        _check(left, len(left) + len(right))
    return left + right


def _product(left: Value, right: Value) -> Value:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, SEQUENCES) and isinstance(other, int):
            _check(one, len(one) * other)
    if isinstance(left, int) and isinstance(right, int):
        _check(left, left.bit_length() + right.bit_length())
    return left * right


def _power(left: Value, right: Value) -> Value:
    if isinstance(left, int) and isinstance(right, int):
        _check(left, left.bit_length() * right)
    return left**right
