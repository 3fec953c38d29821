"""Sends what a plan says: each turn with everything that was said before it, answers included."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from millrace_load.clients import Client, Job, Sample
from millrace_load.workload import Branch, Conversation, Plan, Prompt, Turn


async def send(
    client: Client,
    plan: Plan,
    concurrency: int,
    done: Callable[[], None],
    most: int | None = None,
    start: float | None = None,
) -> list[Sample]:
    """A sample of each request that was sent. `done` is called after each.

    Closed loop, for conversations without a start: each of `concurrency` clients begins the next one when its last one
    has ended. Open loop: a conversation begins when it is due, whether or not earlier ones have ended; with
    `most`, not before fewer than so many are running. What it waits counts as its latency. `start` of the run, by
    time.perf_counter(): now, if it is not given.
    """
    start, sender = time.perf_counter() if start is None else start, Sender(client, done)

    async def one_client(waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await sender.converse(conversation, time.perf_counter())

    running = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)

    async def when_there_is_room(conversation: Conversation, due: float) -> None:
        async with running:
            await sender.converse(conversation, due)

    async with asyncio.TaskGroup() as group:
        waiting = (conversation for conversation in plan.conversations if conversation.start_s is None)
        for _ in range(concurrency):
            group.create_task(one_client(waiting))
        for conversation in plan.conversations:
            if conversation.start_s is not None:
                due = start + conversation.start_s
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(when_there_is_room(conversation, due))
    return sender.samples


class Sender:
    def __init__(self, client: Client, done: Callable[[], None]) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._done = done

    async def converse(self, conversation: Conversation, due: float) -> None:
        """A whole conversation. All of its requests are of one session, those of its branches too."""
        session = f"conversation-{conversation.index}" if conversation.num_requests > 1 else ""
        await self._converse(conversation, due, session)

    async def _converse(
        self, conversation: Conversation, due: float, session: str, before: Prompt | None = None, first: int = 0
    ) -> None:
        """Ends at the first turn without an answer, which the prompt of the next turn would lack, and when the branches
        have ended. `before`: what was said before its first turn, which has the number `first`.
        """
        joins: dict[int | None, list[asyncio.Task[None]]] = defaultdict(list)
        async with asyncio.TaskGroup() as group:

            def begin(branches: Sequence[Branch], turn: int) -> None:
                for branch in branches:
                    so_far = (before, turn) if branch.inherits else (None, 0)
                    task = group.create_task(self._converse(branch.conversation, due, session, *so_far))
                    joins[branch.join_at].append(task)

            begin(conversation.branches, first)
            for number, turn in enumerate(conversation.turns):
                if waited_for := joins[number]:
                    await asyncio.wait(waited_for)
                    due = time.perf_counter()
                due += turn.think_s
                prompt = turn.said if before is None else _joined(before, turn.said)
                sample = await self._ask(turn, conversation.index, prompt, session, due, first + number)
                if not sample.answered:
                    break
                before, due = _joined(prompt, sample.text if isinstance(prompt, str) else sample.tokens), sample.end
                begin(turn.branches, first + number + 1)

    async def _ask(self, turn: Turn, index: int, prompt: Prompt, session: str, due: float, number: int) -> Sample:
        await asyncio.sleep(due - time.perf_counter())
        sample = Sample(due, turn=number)
        self.samples.append(sample)
        await self._client.send(Job(index, prompt, turn.max_tokens, turn.seed, session), sample)
        self._done()
        return sample


def _joined(before: Prompt, after: Prompt) -> Prompt:
    if isinstance(before, str):
        assert isinstance(after, str)
        return before + after
    assert isinstance(after, list)
    return before + after
