"""An answer as a list of blocks (reasoning, texts, calls), each of which begins, grows and ends, one after the other.

Chat sends new parts of one message; the newer APIs tell where each part begins and ends, and begin and end with the
whole message.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millrace_common.json_values import JsonObject

from millrace_router.apis.reading import Reading, call_id
from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.text.call_arguments import NONE, as_object
from millrace_router.text.message import ParsedOutput


class Kind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    kind: Kind
    index: int
    name: str = ""  # of a called function
    id: str = ""  # of a call
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """A call's arguments, as JSON text."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> JsonObject:
        """Those of a call, as an object."""
        return as_object(self.text or NONE)


class Step(enum.Enum):
    BEGIN = enum.auto()
    MORE = enum.auto()
    END = enum.auto()


Change = tuple[Step, Block, str]  # and the new piece, with MORE


class ContentBlocks:
    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, parsed: ParsedOutput, last: bool) -> Iterator[Change]:
        """What `parsed` changes; after the last one no block is open. Run it to its end."""
        yield from self._write(Kind.REASONING, parsed.reasoning)
        for part in parsed.parts:
            if isinstance(part, str):
                yield from self._write(Kind.TEXT, part)
                continue
            if part.name:
                yield from self._begin(Block(Kind.CALL, len(self.all), part.name, call_id(part)))
            yield from self._add(part.arguments)
        if last:
            yield from self._end()

    def _write(self, kind: Kind, text: str) -> Iterator[Change]:
        if text and (self._open is None or self._open.kind is not kind):
            yield from self._begin(Block(kind, len(self.all)))
        yield from self._add(text)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self._open = block
        self.all.append(block)
        yield Step.BEGIN, block, ""

    def _add(self, piece: str) -> Iterator[Change]:
        if piece:
            assert self._open is not None
            self._open.pieces.append(piece)
            yield Step.MORE, self._open, piece

    def _end(self) -> Iterator[Change]:
        if self._open is not None:
            yield Step.END, self._open, ""
            self._open = None


SILENCE = b":\n\n"  # a comment of the stream: the output goes on, nothing can be told of it yet


class BlockForm(ABC):
    keep_alive: bytes

    def __init__(self, answer: Answer, reading: Reading, shows_reasoning: bool = True) -> None:
        self.answer = answer
        self.reading = reading
        self.blocks = ContentBlocks()
        self._shows_reasoning = shows_reasoning

    def whole(self, deltas: Sequence[Delta]) -> JsonObject:
        for delta in deltas:
            self._read(delta)
        return self.ended()

    def push(self, delta: Delta) -> bytes:
        changes = self._read(delta)
        events = [*self.begin()] if delta.first else []
        for change in changes:
            events += self.change(*change)
        return b"".join(events) or SILENCE

    @property
    def extensions(self) -> JsonObject:
        """Of an answer, beyond the vendor's fields."""
        ignored = {"ignored": self.answer.ignored} if self.answer.ignored else {}
        return {"system_fingerprint": self.reading.version or None, **ignored}

    @abstractmethod
    def begin(self) -> Iterator[bytes]: ...

    @abstractmethod
    def change(self, step: Step, block: Block, piece: str) -> Iterator[bytes]: ...

    @abstractmethod
    def ended(self) -> JsonObject: ...

    def _read(self, delta: Delta) -> list[Change]:
        parsed = self.reading.read(delta)
        if not self._shows_reasoning:
            parsed.reasoning = ""
        return list(self.blocks.push(parsed, last=bool(delta.finish_reason)))
