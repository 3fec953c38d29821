"""The output for a client: the continuations of one request as text deltas.

1. `Inference.generate` starts n generations. 2. `deltas` yields, for each continuation, everything new since its
   previous delta: a slow client, or a router that is behind (rounds.py), makes fewer, larger deltas. The first never
   waits. 3. A stop string of the content ends its continuation before the string's first character, and a call the one
   that may have one call only; both abort the workers at once.
4. The first failure ends the stream with its error, after what had arrived before it. 5. Leaving `deltas` in any way
   cancels the rest. 6. While the reader of `deltas` waits, a `sink` gets the deltas between the first and the last.
   `ReaderState` has the states.

A reader that does not come back delays no other stream: its tokens are kept for `unread` engine steps.
"""

import asyncio
import codecs
import enum
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.v1 import common_pb2, inference_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import FieldError, MillraceError

from millrace_router.flow.flow import Stage
from millrace_router.flow.generation import Generation
from millrace_router.flow.rounds import Rounds
from millrace_router.text.message import ContentStop, MessageParser, ParsedOutput, joined
from millrace_router.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """`finish_reason` is set on a continuation's last delta. `completion_tokens` counts from its beginning."""

    index: int
    parsed: ParsedOutput
    token_ids: list[int]
    logprobs: list[common_pb2.TokenLogprobs]
    finish_reason: common_pb2.FinishReason
    completion_tokens: int
    cached_tokens: int
    usage: inference_pb2.Usage  # what attempts reported when they ended
    first: bool
    stopped_by: str = ""  # the stop string that ended it
    version: str = ""  # of the weights that computed it


class AnswerText:
    """Tokens to what they say, cut at a stop string. A character whose bytes are spread over tokens appears when it is
    complete; bytes that can never become one appear as U+FFFD. With a parser of plain text and without a stop string
    all pieces together equal `Tokenizer.decode` of all ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: MessageParser,
        stops: Sequence[str] = (),
        *,
        keep_special: bool = False,
        one_call: bool = False,
    ) -> None:
        """`one_call`: the first call ends the text, too."""
        self._tokenizer = tokenizer
        self._parser = parser
        self._keep_special = keep_special
        self._one_call = one_call
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = ContentStop(stops) if stops else None
        self.stopped = False
        self.stopped_by = ""  # the stop string that ended it

    def push(self, ids: list[int]) -> tuple[ParsedOutput, int]:
        """What they say, and how many of them were used: up to the one with which it is certain that the text ends."""
        if self._stop is None and not self._one_call:
            return self._parser.push(self._decode(ids), last=False), len(ids)
        parsed: list[ParsedOutput] = []
        for token in ids:
            parsed.append(self._cut(self._parser.push(self._decode((token,)), last=False)))
            if self.stopped:
                break
        return joined(parsed), len(parsed)

    def flush(self, cut: bool = False) -> ParsedOutput:
        """The output has ended, `cut`: by its length."""
        parsed = self._cut(self._parser.push(self._decoder.decode(b"", final=True), last=True, cut=cut))
        return parsed if self._stop is None or self.stopped else joined((parsed, self._stop.flush()))

    def _cut(self, parsed: ParsedOutput) -> ParsedOutput:
        if self._stop is not None:
            parsed = self._stop.push(parsed)
            self.stopped_by = self._stop.matched
        self.stopped = bool(self.stopped_by) or (self._one_call and self._parser.called)
        return parsed

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(ids, self._keep_special))


class Continuation:
    """One generation with its text. `on_gap` gets the seconds between two deltas."""

    def __init__(self, index: int, generation: Generation, text: AnswerText, on_gap: Callable[[float], None]) -> None:
        self.generation = generation
        self.finished = False
        self.completion_tokens = 0
        self._index = index
        self._text = text
        self._on_gap = on_gap
        self._read_at: float | None = None

    @property
    def news(self) -> bool:
        """`read` has something to return or to raise."""
        flow = self.generation.flow
        return len(flow.outputs) != flow.taken or flow.ended

    def _error(self) -> MillraceError:
        """The generation's. Of a request that the router has checked, workers refuse nothing but the grammar."""
        error = self.generation.flow.error
        assert error is not None
        refused = error.reason is Reason.INVALID_ARGUMENT and self.generation.job.sampling.HasField("grammar")
        return FieldError("grammar", f"is refused: {error.message}") if refused else error

    def read(self) -> Delta | None:
        """Return the new delta, or None. Raises the generation's error once everything before it was read."""
        flow = self.generation.flow
        tokens, logprobs = flow.take()
        if not tokens and flow.stage is not Stage.DONE:
            if not flow.ended:
                return None
            raise self._error()
        parsed, used = self._text.push(tokens)
        finish_reason = flow.finish_reason
        if finish_reason and not self._text.stopped:
            parsed = joined((parsed, self._text.flush(cut=finish_reason == common_pb2.FINISH_REASON_LENGTH)))
        if self._text.stopped:
            self.generation.stop()
            finish_reason = common_pb2.FINISH_REASON_STOP
        now = time.perf_counter()
        if self._read_at is not None:
            self._on_gap(now - self._read_at)
        self._read_at = now
        first, self.finished = self.completion_tokens == 0, finish_reason != 0
        self.completion_tokens += used
        return Delta(
            self._index,
            parsed,
            tokens[:used],
            logprobs[:used],
            finish_reason,
            self.completion_tokens,
            self.generation.cached_tokens,
            self.generation.usage,
            first,
            self._text.stopped_by,
            self.generation.version,
        )


class Sink(Protocol):
    """Takes deltas in the turn of their round itself, without a task to wake for each."""

    @property
    def ready(self) -> bool:
        """Else the task has to come."""

    def push(self, delta: Delta) -> None: ...


class ReaderState(enum.Enum):
    """What the reader of a stream does, and so what becomes of news."""

    AWAY = enum.auto()  # it has deltas, and comes back: news stay, and are counted
    FIRST = enum.auto()  # waits, and has read nothing yet: it is woken at once
    WAITS = enum.auto()  # the stream joins a round
    JOINED = enum.auto()  # the round brings its turn: the sink takes the news, or the reader is woken


class Stream:
    """`on_end` is called once, with the error that ended the stream or None."""

    def __init__(self, on_end: Callable[[MillraceError | None], None], unread: int, rounds: Rounds) -> None:
        self.continuations: list[Continuation] = []
        self.sink: Sink | None = None
        self._on_end: Callable[[MillraceError | None], None] | None = on_end
        self._rounds = rounds
        self._open: list[Continuation] = []  # that are not read to their end
        self._reader = ReaderState.AWAY
        self._begun = False  # the reader has read something
        self._turn = asyncio.get_running_loop().create_future()  # what the reader waits for
        self._unread = 0  # calls of `wake` since the reader was here
        self._limit = unread

    def wake(self) -> None:
        match self._reader:
            case ReaderState.WAITS:
                self._reader = ReaderState.JOINED
                self._rounds.join(self._take_turn)
            case ReaderState.JOINED:
                self._rounds.wait()
            case ReaderState.FIRST:
                self._take_turn()
            case ReaderState.AWAY:
                self._unread += 1
                if self._unread == self._limit + 1:
                    message = f"the client has not read the outputs of more than {self._limit} engine steps"
                    self.cancel(MillraceError(Reason.SLOW_CLIENT, message))

    def _take_turn(self) -> bool:
        """Whether the sink has taken everything; else the reader, if it has not gone, is woken."""
        if self._turn.done():
            return True
        joined, self._reader = self._reader is ReaderState.JOINED, ReaderState.WAITS
        try:
            if joined and self.sink is not None and self._push(self.sink):
                return True
            self._turn.set_result(None)
        except Exception as error:
            self._turn.set_exception(error)
        self._reader = ReaderState.AWAY
        return False

    def _push(self, sink: Sink) -> bool:
        """False: something is left for the reader, at least the end of a continuation."""
        for continuation in self._open:
            if not sink.ready or continuation.generation.flow.ended:
                return False
            delta = continuation.read()
            if delta is not None:
                sink.push(delta)
                if continuation.finished:
                    return False
        return True

    async def _wait(self) -> None:
        self._turn = asyncio.get_running_loop().create_future()
        self._reader = ReaderState.WAITS if self._begun else ReaderState.FIRST
        if any(continuation.news for continuation in self._open):  # since it was read
            self.wake()
        await self._turn

    def cancel(self, error: MillraceError) -> None:
        """End what still runs; a reader gets `error`."""
        for continuation in self.continuations:
            continuation.generation.cancel(error)

    def close(self, error: MillraceError | None = None) -> None:
        """End the reading. Idempotent. `error`: its cause, None when everything was read."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self.cancel(error or gone())
            on_end(error)
            self.continuations = self._open = []  # they refer to this stream: leave no cycle to the garbage collector

    async def deltas(self) -> AsyncIterator[Delta]:
        self._open = self.continuations
        error: MillraceError | None = gone()
        try:
            while self._open:
                self._unread = 0
                for continuation in self._open:
                    if (delta := continuation.read()) is not None:
                        self._begun = True
                        yield delta
                        if self._on_end is None:  # closed meanwhile
                            raise gone()
                if not any(continuation.finished for continuation in self._open):
                    await self._wait()
                self._open = [continuation for continuation in self._open if not continuation.finished]
            error = None
        except Exception as failure:
            error = MillraceError.of(failure)
            raise
        finally:
            self.close(error)


def gone() -> MillraceError:
    """A new one each time: an exception that is raised keeps its traceback."""
    return MillraceError(Reason.CANCELLED, "the client went away")
