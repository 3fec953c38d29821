"""Sends what a plan says: each turn with everything that was said before it, answers included."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from millrace_load.clients import Client, Job, Sample
from millrace_load.workload import Conversation, Plan, Prompt


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
    start, samples = time.perf_counter() if start is None else start, list[Sample]()

    async def one_client(waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await _converse(client, conversation, time.perf_counter(), samples, done)

    running = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)

    async def when_there_is_room(conversation: Conversation, due: float) -> None:
        async with running:
            await _converse(client, conversation, due, samples, done)

    async with asyncio.TaskGroup() as group:
        waiting = (conversation for conversation in plan.conversations if conversation.start_s is None)
        for _ in range(concurrency):
            group.create_task(one_client(waiting))
        for conversation in plan.conversations:
            if conversation.start_s is not None:
                due = start + conversation.start_s
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(when_there_is_room(conversation, due))
    return samples


async def _converse(
    client: Client, conversation: Conversation, due: float, samples: list[Sample], done: Callable[[], None]
) -> None:
    """Ends at the first turn without an answer: the prompt of the next turn would lack it."""
    session = f"conversation-{conversation.index}" if len(conversation.turns) > 1 else ""
    before: Prompt | None = None
    for number, turn in enumerate(conversation.turns):
        due += turn.think_s
        await asyncio.sleep(due - time.perf_counter())
        prompt = turn.said if before is None else _joined(before, turn.said)
        sample = Sample(due, turn=number)
        samples.append(sample)
        await client.send(Job(conversation.index, prompt, turn.max_tokens, turn.seed, session), sample)
        done()
        if not sample.answered:
            break
        before, due = _joined(prompt, sample.text if isinstance(prompt, str) else sample.tokens), sample.end


def _joined(before: Prompt, after: Prompt) -> Prompt:
    if isinstance(before, str):
        assert isinstance(after, str)
        return before + after
    assert isinstance(after, list)
    return before + after
