"""The compilations of a router: fair between tenants, bounded, and over when nobody waits."""

import asyncio
import json
import threading

import pytest
from millrace_common.grammar.checker import CompilerStarved, NobodyWaits
from millrace_common.grammar.source import GrammarError
from millrace_common.reasons import Reason
from millrace_router.flow.ask import Ask
from millrace_router.flow.grammars import MAX_WAITING, PROCESSES, RequestGrammars, Turns
from millrace_router.text.call_grammar import Calls
from millrace_router.text.chat_format import Style, Tool
from millrace_rpc.errors import FieldError, MillraceError
from millrace_testing import HANG_S
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
        if text == "starved" and self.begun.count(text) == 1:
            raise CompilerStarved
        if "bad" in text:
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
        turns.give_back(tenant)

    tasks = [asyncio.create_task(work(tenant)) for tenant in "aaabab"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    turns.give_back("a")
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order in (["b", "a", "b", "a", "a"], ["a", "b", "a", "b", "a"])
    await asyncio.wait_for(turns.take("c"), HANG_S)


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
    turns.give_back("a")
    await asyncio.wait_for(other, HANG_S)
    for tenant, next_one in zip("ba", waiting, strict=True):
        turns.give_back(tenant)
        await asyncio.wait_for(next_one, HANG_S)


async def test_a_grammar_is_compiled_once(grammars: RequestGrammars, gate: Gate) -> None:
    jobs = [asyncio.create_task(grammars._problem("regex", "bad", tenant)) for tenant in "aab"]
    await until(lambda: len(gate.begun) == 1)
    gate.open.set()
    assert await asyncio.gather(*jobs) == ["it is bad"] * 3
    assert await grammars._problem("regex", "bad", "c") == "it is bad" and gate.begun == ["bad"]
    assert await grammars._problem("json_schema", "bad", "c") == "it is bad" and len(gate.begun) == 2


async def test_a_grammar_whose_compiler_was_starved_may_be_tried_again(grammars: RequestGrammars, gate: Gate) -> None:
    gate.open.set()
    with pytest.raises(MillraceError) as caught:
        await grammars._problem("regex", "starved", "a")
    assert caught.value.reason is Reason.OVERLOADED
    assert await grammars._problem("regex", "starved", "a") == ""


async def test_schemas_of_tools_are_read_by_a_process_first(
    grammars: RequestGrammars, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open.set()
    monkeypatch.setattr("millrace_router.flow.grammars.call_grammar", lambda *given: pytest.fail("read here"))
    tools = tuple(Tool(name, None, {"title": name}, name != "loose") for name in ("good", "loose", "bad"))
    for required, read in ((False, ["good", "bad"]), (True, ["loose"])):
        with pytest.raises(FieldError, match="tools cannot be used: the parameters of bad cannot be kept it is bad"):
            await grammars.settle(Ask(model="", prompt=None, calls=Calls(Style.V31, tools, required, True)), str, "a")
        assert gate.begun == [json.dumps({"title": name}) for name in read]
        gate.begun.clear()


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
