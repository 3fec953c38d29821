"""Separation of a model's reasoning and answer in the stream.

    <think> reasoning </think> answer

The prompt may end with <think> already (DeepSeek R1, V3.1 thinking); then the output begins with reasoning. White space
around the two is not part of them. Kimi K2 may call tools without ending its reasoning.
"""

import enum
from collections.abc import Sequence

from millrace_router.text.markers import THINK, THINK_END, Scanner


class _State(enum.Enum):
    START = enum.auto()  # it may begin with <think>
    REASONING = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Every `push` and the final `flush` give the new (reasoning, answer). What comes out does not depend on how the
    text was cut into pieces.
    """

    def __init__(self, thinking: bool, ends: Sequence[str] = ()) -> None:
        """`thinking`: the prompt ended inside the reasoning. `ends`: texts that begin the answer without </think>."""
        self._state = _State.REASONING if thinking else _State.START
        self._ends = (THINK_END, *ends)
        self._scanner = Scanner()
        self._space = ""  # after reasoning: part of it if more comes
        self._begun = False  # something but white space was seen in this state

    def push(self, text: str) -> tuple[str, str]:
        if self._state is _State.ANSWER and self._begun:  # nearly always
            return "", text
        self._scanner.text += text
        if self._state is _State.START:
            self._start()
        reasoning = ""
        if self._state is _State.REASONING:
            before, marker = self._scanner.until(*self._ends)
            reasoning = self._trimmed(before)
            if marker:
                if marker != THINK_END:
                    self._scanner.text = marker + self._scanner.text
                self._state, self._begun = _State.ANSWER, False
        return reasoning, self._answer() if self._state is _State.ANSWER else ""

    def flush(self) -> tuple[str, str]:
        rest = self._scanner.rest()
        return (self._trimmed(rest), "") if self._state is _State.REASONING else ("", rest.strip() and rest)

    def _start(self) -> None:
        text = self._scanner.text.lstrip()
        if text.startswith(THINK):
            self._scanner.text = text[len(THINK) :]
            self._state = _State.REASONING
        elif not THINK.startswith(text):
            self._state, self._begun = _State.ANSWER, True

    def _answer(self) -> str:
        text = self._scanner.rest()
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text

    def _trimmed(self, text: str) -> str:
        """`text` of the reasoning without white space at its beginning and, for now, at its end."""
        text = self._space + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._begun = self._begun or bool(kept)
        self._space = text[len(kept) :]
        return kept
