"""Grammars of requests, compiled before a request is placed: by processes that can be killed, fairly between tenants.

What a grammar turned out to be is remembered, so an agent's next request does not wait.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from millrace_common.grammar.checker import Checker, CompilerStarved
from millrace_common.grammar.source import GrammarError
from millrace_common.reasons import Reason
from millrace_rpc.errors import FieldError, MillraceError

from millrace_router.flow.ask import Ask
from millrace_router.text.call_grammar import call_grammar

PROCESSES = 2
MAX_WAITING = 16  # grammars of a tenant that are not begun
MAX_REMEMBERED = 4096
P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """So many jobs at once, those that wait tenant by tenant: no tenant has more in the common line than can run."""

    def __init__(self, count: int, most_waiting: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(count))
        self._waiting: Counter[str] = Counter()
        self._most_waiting = most_waiting

    async def take(self, tenant: str) -> None:
        """Raises QUEUE_FULL."""
        if self._waiting[tenant] >= self._most_waiting:
            message = f"{self._waiting[tenant]} grammars of this tenant wait to be compiled, the limit"
            raise MillraceError(Reason.QUEUE_FULL, message)
        self._waiting[tenant] += 1
        try:
            async with contextlib.AsyncExitStack() as held:
                await held.enter_async_context(self._of[tenant])
                await self._free.acquire()
                held.pop_all()
        finally:
            self._waiting[tenant] -= 1

    def give_back(self, tenant: str) -> None:
        self._of[tenant].release()
        self._free.release()


@dataclass(slots=True, eq=False)
class _GrammarCheck:
    task: asyncio.Task[str]
    given_up: threading.Event
    waiting: int = 0


class RequestGrammars:
    def __init__(self) -> None:
        self._checker = Checker(PROCESSES)
        self._threads = ThreadPoolExecutor(PROCESSES, "grammar")
        self._turns = Turns(PROCESSES, MAX_WAITING)
        self._jobs: dict[bytes, _GrammarCheck] = {}
        self._problems: OrderedDict[bytes, str] = OrderedDict()  # empty: none

    async def settle(self, ask: Ask, token_of: Callable[[str], int | None], tenant: str) -> Ask:
        """The request with the grammar that workers get, which compiles. Raises MillraceError."""
        if (answer := ask.calls.answer if ask.calls else ask.grammar) is not None:
            kind = answer.WhichOneof("kind")
            assert kind is not None, "validate.py has checked it"
            if problem := await self._problem(kind, getattr(answer, kind), tenant):
                raise FieldError("grammar", f"has a {kind} that cannot be used: {problem}")
        if ask.calls is None:
            return ask
        # A process with limits reads each schema before a thread, which nothing can end, does in `call_grammar`.
        for tool in ask.calls.tools if ask.calls.required else (tool for tool in ask.calls.tools if tool.strict):
            if problem := await self._problem("json_schema", json.dumps(tool.parameters), tenant):
                raise FieldError("tools", f"cannot be used: the parameters of {tool.name} cannot be kept {problem}")
        try:
            grammar = await self._in_turn(tenant, call_grammar, ask.calls, token_of)
        except GrammarError as error:
            raise FieldError("tools", f"cannot be used: {error}") from error
        if problem := await self._problem("lark", grammar.lark, tenant):
            raise FieldError("tools", f"cannot be used: the calls cannot be kept: {problem}")
        return replace(ask, grammar=grammar, origins={**ask.origins, ("grammar",): ("tools",)})

    def close(self) -> None:
        for job in self._jobs.values():
            job.given_up.set()
        self._checker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _problem(self, kind: str, text: str, tenant: str) -> str:
        key = hashlib.sha256(f"{kind}:{text}".encode(errors="surrogatepass")).digest()
        if key in self._problems:
            self._problems.move_to_end(key)
            return self._problems[key]
        job = self._jobs.get(key) or self._begin(key, kind, text, tenant)
        job.waiting += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.task.done():
                job.given_up.set()
                job.task.cancel()
                del self._jobs[key]

    def _begin(self, key: bytes, kind: str, text: str, tenant: str) -> _GrammarCheck:
        given_up = threading.Event()
        job = _GrammarCheck(asyncio.create_task(self._compile(kind, text, tenant, given_up)), given_up)
        self._jobs[key] = job

        def over(task: asyncio.Task[str]) -> None:
            if self._jobs.get(key) is job:
                del self._jobs[key]
            if not task.cancelled() and task.exception() is None:
                self._problems[key] = task.result()
                if len(self._problems) > MAX_REMEMBERED:
                    self._problems.popitem(last=False)

        job.task.add_done_callback(over)
        return job

    async def _compile(self, kind: str, text: str, tenant: str, given_up: threading.Event) -> str:
        try:
            await self._in_turn(tenant, self._checker.check, kind, text, given_up)
        except GrammarError as error:
            return str(error)
        except CompilerStarved as error:
            raise MillraceError(Reason.OVERLOADED, str(error)) from error
        return ""

    async def _in_turn(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        await self._turns.take(tenant)
        future = self._threads.submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.give_back, tenant))
        return await asyncio.wrap_future(future)
