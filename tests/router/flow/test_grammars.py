"""The compilations of a router: fair between tenants, bounded, and over when nobody waits."""

from __future__ import annotations

import asyncio
import threading

import pytest
from millrace_common.grammar.checker import NobodyWaits
from millrace_common.grammar.source import GrammarError
from millrace_common.reasons import Reason
from millrace_router.flow.grammars import MAX_WAITING, PROCESSES, RequestGrammars, Turns
from millrace_rpc.errors import MillraceError
from router.harness import until


class Gate:
    """In the place of the processes: a text waits until it is opened."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.left: list[str] = []
        self.open = threading.Event()

    def check(self, kind: str, text: str, given_up: threading.Event) -> str:
        self.begun.append(text)
        while not self.open.wait(0.01):
            if given_up.is_set():
                self.left.append(text)
                raise NobodyWaits
        if text == "bad":
            raise GrammarError("it is bad")
        return text

    def close(self) -> None:
        self.open.set()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def grammars(gate: Gate) -> RequestGrammars:
    made = RequestGrammars()
    made._checker = gate  # type: ignore[assignment]
    yield made
    made.close()


async def test_tenants_take_turns() -> None:
    turns, order = Turns(1, MAX_WAITING), []
    await turns.take("a")

    async def work(tenant: str) -> None:
        await turns.take(tenant)
        order.append(tenant)
        turns.give_back()

    tasks = [asyncio.create_task(work(tenant)) for tenant in "aaabab"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order in (["b", "a", "b", "a", "a"], ["a", "b", "a", "b", "a"])
    await asyncio.wait_for(turns.take("c"), 120)


async def test_a_tenants_line_is_bounded_and_holds_up_nobody_else() -> None:
    turns = Turns(1, 2)
    await turns.take("a")
    waiting = [asyncio.create_task(turns.take("a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(MillraceError) as caught:
        await turns.take("a")
    assert caught.value.reason is Reason.QUEUE_FULL
    other = asyncio.create_task(turns.take("b"))
    await asyncio.sleep(0)
    turns.give_back()
    turns.give_back()
    await asyncio.wait_for(other, 120)
    turns.give_back()
    await asyncio.gather(*waiting)


async def test_a_grammar_is_compiled_once(grammars: RequestGrammars, gate: Gate) -> None:
    jobs = [asyncio.create_task(grammars._problem("regex", "bad", tenant)) for tenant in "aab"]
    await until(lambda: len(gate.begun) == 1)
    gate.open.set()
    assert await asyncio.gather(*jobs) == ["it is bad"] * 3
    assert await grammars._problem("regex", "bad", "c") == "it is bad" and gate.begun == ["bad"]
    assert await grammars._problem("json_schema", "bad", "c") == "it is bad" and len(gate.begun) == 2


async def test_a_job_ends_with_its_last_waiter(grammars: RequestGrammars, gate: Gate) -> None:
    """Those that wait for one that leaves go on; a job that has not begun never does."""
    first, also, alone = (asyncio.create_task(grammars._problem("regex", text, "a")) for text in ("x", "x", "y"))
    await until(lambda: sorted(gate.begun) == ["x", "y"])
    late = asyncio.create_task(grammars._problem("regex", "z", "a"))
    await asyncio.sleep(0.05)
    assert PROCESSES == 2 and "z" not in gate.begun
    for task in (first, alone, late):
        task.cancel()
    await until(lambda: gate.left == ["y"])
    gate.open.set()
    assert await also == "" and "z" not in gate.begun
    assert await grammars._problem("regex", "y", "a") == "", "it may come back"
