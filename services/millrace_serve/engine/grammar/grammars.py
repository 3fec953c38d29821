"""Grammars of requests: compiled beside the engine's loop, walked by their sequences. No torch; the compiler proper is
engine/grammar/llguidance_compiler.py.

1. `admit` sees every message on its way to the scheduler. A Submit whose grammar was never seen starts a compilation in
   a thread; the Submit and all later messages of its request wait here, in order; other messages pass. An Abort ends
   the wait.
2. `admitted` returns the messages whose compilation has ended, with or without success, or whose deadline has passed.
3. `walk` makes the sequence's `Walk` when the scheduler enrols it, or returns why the request is refused.
4. The walk's mask restricts the sequence's next token (engine/step/sampling.py). It is a function of the grammar and
   the outputs alone, so preemption keeps it, and another attempt or the decode worker rebuilds it from the outputs it
   is given.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from millrace_common.grammar.checker import CompilerStarved
from millrace_common.grammar.source import GrammarError
from millrace_common.log import PER_REQUEST
from millrace_common.reasons import Reason

from millrace_serve.engine.core import Abort, Failure, FlushCache, Grammar, Request, RequestId, SchedulerInput, Submit

log = logging.getLogger(__name__)

MAX_COMPILED = 128  # grammars kept; the least recently used one goes
COMPILE_THREADS = 2


class Matcher(Protocol):
    """A state of a compiled grammar."""

    @property
    def mask(self) -> np.ndarray:
        """int32 [ceil(V / 32)]; bit t % 32 of word t // 32: token t may come next. Valid until the state changes.
        Nothing may come where it would take too long to say what.
        """

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; empty: it can."""

    def accept(self, token: int) -> bool:
        """Advance by one token. False, and nothing changes: the grammar does not allow it, or it ends the sequence."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""


class Compiler(Protocol):
    def compile(self, grammar: Grammar, given_up: threading.Event) -> Callable[[], Matcher]:
        """Return a factory of matchers in the initial state. Raises GrammarError, CompilerStarved, and NobodyWaits soon
        after `given_up` is set. Called by several threads.
        """

    def free(self, grammar: Grammar) -> np.ndarray:
        """The mask of what may stand before the grammar begins."""

    def close(self) -> None:
        """End the compilations."""


Compiled: TypeAlias = Future[Callable[[], Matcher]]


class _Job(NamedTuple):
    compiled: Compiled
    given_up: threading.Event

    @property
    def over(self) -> bool:
        """It ends without a result, or did, and another try may have one."""
        if self.given_up.is_set() or self.compiled.cancelled():
            return True
        return self.compiled.done() and not isinstance(self.compiled.exception(), GrammarError | None)


class Walk:
    """The state of one sequence in its grammar: free up to the token `after`, if given, then by a matcher."""

    def __init__(self, start: Callable[[], Matcher], after: int | None, free: np.ndarray) -> None:
        self._start = start
        self._after = after
        self._free = free
        self._matcher = start() if after is None else None

    @property
    def mask(self) -> np.ndarray:
        """As in Matcher."""
        return self._free if self._matcher is None else self._matcher.mask

    def masks(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Copies of the mask now and behind each of the leading `tokens` that the grammar allows; the walk stays here.

        A token that ends the sequence, or that the grammar cannot go on from, ends the list: it has 1 to
        1 + len(tokens) masks, and what is sampled in rows without one is not to be taken.
        """
        matcher, masks = self._matcher, [self.mask.copy()]
        for token in tokens:
            if not self._advance(token):
                break
            masks.append(self.mask.copy())
        if matcher is not None:
            matcher.rollback(len(masks) - 1)
        self._matcher = matcher
        return masks if masks[-1].any() else masks[:-1]

    def accept(self, tokens: Iterable[int]) -> Failure | None:
        """Advance by outputs that did not end the sequence. Returns a failure when no continuation exists."""
        for token in tokens:
            if not self._advance(token):
                return self._failure(f"the grammar does not allow token {token} of the output")
        if not self.mask.any():
            return self._failure("the grammar has no continuation after this output")
        return None

    def _failure(self, message: str) -> Failure:
        if self._matcher is not None and self._matcher.error:
            message = f"the grammar is too complex to go on after this output: {self._matcher.error}"
        return Failure(Reason.INVALID_ARGUMENT, message)

    def _advance(self, token: int) -> bool:
        if self._matcher is not None:
            return self._matcher.accept(token)
        if token == self._after:
            self._matcher = self._start()
        return bool(self._free[token // 32] >> token % 32 & 1)


class _Held(NamedTuple):
    """A request that waits for its grammar."""

    since: float
    job: _Job
    submit: Submit
    later: list[SchedulerInput]


class Grammars:
    """Not thread-safe: used by the engine's thread. Without a compiler every grammar is refused."""

    def __init__(self, compiler: Compiler | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._compiler = compiler
        self._clock = clock
        self._jobs: OrderedDict[Grammar, _Job] = OrderedDict()
        self._held: dict[RequestId, _Held] = {}
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")  # a thread starts when it is needed

    @property
    def waiting(self) -> int:
        """Requests whose grammars are being compiled."""
        return len(self._held)

    def admit(self, message: SchedulerInput) -> list[SchedulerInput]:
        """Return the message if it may go on to the scheduler now."""
        if isinstance(message, FlushCache) or not (self._held or isinstance(message, Submit)):  # nearly always
            return [message]
        id = message.request.id if isinstance(message, Submit) else message.id
        if id in self._held:
            self._held[id].later.append(message)
            return self._give_up(id) if isinstance(message, Abort) else []
        if not isinstance(message, Submit) or self._compiler is None:
            return [message]
        grammar = message.request.sampling.grammar
        if grammar is None or (job := self._job(grammar)).compiled.done():
            return [message]
        self._held[id] = _Held(self._clock(), job, message, [])
        return []

    def admitted(self) -> list[SchedulerInput]:
        """The messages of requests whose compilation or time has ended, in order for each of them."""
        ready: list[SchedulerInput] = []
        for id, (since, job, submit, later) in list(self._held.items()):
            waited_s, timeout_s = self._clock() - since, submit.request.timeout_s
            if job.compiled.done():
                del self._held[id]
                ready += [_shortened(submit, waited_s), *later]
            elif timeout_s is not None and waited_s >= timeout_s:
                ready += self._give_up(id)
        return ready

    def walk(self, request: Request) -> Walk | Failure:
        """The request's walk, after the outputs of its earlier attempts."""
        grammar = request.sampling.grammar
        assert grammar is not None
        if self._compiler is None:
            return Failure(Reason.INVALID_ARGUMENT, "this worker has no tokenizer, which grammars need")
        job = self._jobs.get(_key(grammar)) or self._job(grammar)  # all that waited for one that failed share that
        try:
            start = job.compiled.result()
        except GrammarError as error:
            return Failure(Reason.INVALID_ARGUMENT, f"{grammar.kind}: {error}")
        except CompilerStarved as error:
            return Failure(Reason.OVERLOADED, str(error))
        except Exception as error:  # of the compiler, or the system that it runs on: no reason to end the engine
            log.exception("a grammar could not be compiled", extra=PER_REQUEST)
            return Failure(Reason.INTERNAL, f"the grammar could not be compiled: {type(error).__name__}: {error}")
        walk = Walk(start, grammar.after_token_id, self._compiler.free(grammar))
        return walk.accept(request.token_ids[len(request.token_ids) - request.num_prior_outputs :]) or walk

    def close(self) -> None:
        """Compilations end without a result."""
        for job in self._jobs.values():
            job.given_up.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _give_up(self, id: RequestId) -> list[SchedulerInput]:
        """The messages of a request that ends before its compilation: no token of it needs the grammar. A compilation
        ends with the last one that waits for it.
        """
        since, job, submit, later = self._held.pop(id)
        if not self._is_awaited(job):
            job.given_up.set()
            job.compiled.cancel()
        request = _shortened(submit, self._clock() - since).request
        sampling = msgspec.structs.replace(request.sampling, grammar=None)
        return [Submit(msgspec.structs.replace(request, sampling=sampling)), *later]

    def _job(self, grammar: Grammar) -> _Job:
        assert self._compiler is not None
        key = _key(grammar)
        job = self._jobs.get(key)
        if job is None or (job.over and not self._is_awaited(job)):
            self._forget_oldest()
            given_up = threading.Event()
            job = self._jobs[key] = _Job(self._threads.submit(self._compiler.compile, key, given_up), given_up)
        self._jobs.move_to_end(key)
        return job

    def _forget_oldest(self) -> None:
        """Forget the oldest compiled grammar without waiting requests, when there are too many."""
        if len(self._jobs) < MAX_COMPILED:
            return
        idle = (key for key, job in self._jobs.items() if job.compiled.done() and not self._is_awaited(job))
        if (oldest := next(idle, None)) is not None:
            del self._jobs[oldest]

    def _is_awaited(self, job: _Job) -> bool:
        return any(held.job is job for held in self._held.values())


def _key(grammar: Grammar) -> Grammar:
    """What its compilation depends on."""
    return msgspec.structs.replace(grammar, after_token_id=None, forbidden_before=())


def _shortened(submit: Submit, waited_s: float) -> Submit:
    """Subtract the time that the request waited here from its deadline."""
    request = submit.request
    if request.timeout_s is None:
        return submit
    return Submit(msgspec.structs.replace(request, timeout_s=max(request.timeout_s - waited_s, 0.0)))
