"""Separation of a model's thoughts and answer in the stream.

    <think> thoughts </think> answer

The prompt may end with <think> already (DeepSeek R1, V3.1 thinking); then the output begins with thoughts. White space
around the two is not part of them. Kimi K2 may call tools without ending its thoughts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from millrace_router.text.markers import THINK, THINK_END, Scanner


class _ThoughtState(enum.Enum):
    START = enum.auto()  # it may begin with <think>
    THOUGHTS = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Every `push` and the final `flush` give the new (thoughts, answer). What comes out does not depend on how the
    text was cut into pieces.
    """

    def __init__(self, thinking: bool, ends: Sequence[str] = ()) -> None:
        """`thinking`: the prompt ended inside the thoughts. `ends`: texts that begin the answer without </think>."""
        self._state = _ThoughtState.THOUGHTS if thinking else _ThoughtState.START
        self._ends = (THINK_END, *ends)
        self._scanner = Scanner()
        self._space = ""  # after thoughts: part of them if more of them come
        self._begun = False  # something but white space was seen in this state

    def push(self, text: str) -> tuple[str, str]:
        if self._state is _ThoughtState.ANSWER and self._begun:  # nearly always
            return "", text
        self._scanner.text += text
        if self._state is _ThoughtState.START:
            self._start()
        thoughts = ""
        if self._state is _ThoughtState.THOUGHTS:
            before, marker = self._scanner.until(*self._ends)
            thoughts = self._trimmed(before)
            if marker:
                if marker != THINK_END:
                    self._scanner.text = marker + self._scanner.text
                self._state, self._begun = _ThoughtState.ANSWER, False
        return thoughts, self._answer() if self._state is _ThoughtState.ANSWER else ""

    def flush(self) -> tuple[str, str]:
        """The text has ended."""
        rest = self._scanner.rest()
        return (self._trimmed(rest), "") if self._state is _ThoughtState.THOUGHTS else ("", rest.strip() and rest)

    def _start(self) -> None:
        text = self._scanner.text.lstrip()
        if text.startswith(THINK):
            self._scanner.text = text[len(THINK) :]
            self._state = _ThoughtState.THOUGHTS
        elif not THINK.startswith(text):
            self._state, self._begun = _ThoughtState.ANSWER, True

    def _answer(self) -> str:
        text = self._scanner.rest()
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text

    def _trimmed(self, text: str) -> str:
        """`text` of the thoughts without the white space at their beginning and, for now, at their end."""
        text = self._space + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._begun = self._begun or bool(kept)
        self._space = text[len(kept) :]
        return kept
