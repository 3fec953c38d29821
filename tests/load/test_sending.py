"""Closed and open loops, and the prompts of conversations, against a client that answers by itself."""

import asyncio
import time
from dataclasses import replace

import pytest
from millrace_load.clients import Job, Sample, Target
from millrace_load.sending import send
from millrace_load.workload import Branch, Conversation, Plan, Prompt, Turn


class Answering:
    """Answers prompts of n tokens with [n], and texts with "!", after `together` requests have been there at once. The
    request of seed `failing` fails.
    """

    def __init__(self, failing: int = -1, together: int = 1) -> None:
        self.jobs: list[Job] = []
        self.starts: list[float] = []
        self.now = self.most = 0
        self._failing = failing
        self._together, self._met = together, asyncio.Event()

    async def target(self) -> Target:
        return Target("none", 100, 100)

    async def num_tokens(self, text: str) -> int | None:
        return len(text)

    async def close(self) -> None:
        pass

    async def send(self, job: Job, sample: Sample) -> None:
        self.jobs.append(job)
        self.starts.append(time.perf_counter())
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self._together:
            self._met.set()
        await self._met.wait()
        self.now -= 1
        sample.end = time.perf_counter()
        if job.seed == self._failing:
            sample.error = "QUEUE_FULL"
            return
        sample.arrivals.append(sample.end)
        if isinstance(job.prompt, str):
            sample.text = "!"
        else:
            sample.tokens = [len(job.prompt)]


def talk(index: int, *said: Prompt, start_s: float | None = None, think_s: float = 0.0) -> Conversation:
    turns = (Turn(item, 5, 10 * index + i, think_s if i else 0.0) for i, item in enumerate(said))
    return Conversation(index, tuple(turns), start_s)


async def sent(client: Answering, *conversations: Conversation, concurrency: int = 1) -> list[Sample]:
    ended = []
    samples = await send(client, Plan(conversations), concurrency, lambda: ended.append(1))
    assert len(ended) == len(client.jobs) == len(samples)
    return samples


async def test_a_prompt_is_all_that_was_said_and_answered() -> None:
    client = Answering()
    samples = await sent(client, talk(0, [7, 7], [8], [9]))
    assert [job.prompt for job in client.jobs] == [[7, 7], [7, 7, 2, 8], [7, 7, 2, 8, 4, 9]]
    assert [sample.turn for sample in samples] == [0, 1, 2]


async def test_so_is_a_text() -> None:
    client = Answering()
    await sent(client, talk(0, "one", " two", " three"))
    assert [job.prompt for job in client.jobs] == ["one", "one! two", "one! two! three"]


async def test_turns_of_a_conversation_have_a_session_and_single_requests_none() -> None:
    client = Answering()
    await sent(client, talk(4, [1], [2]), talk(5, [1]))
    assert [job.session for job in client.jobs] == ["conversation-4", "conversation-4", ""]


async def test_a_conversation_ends_with_its_first_failure_and_others_go_on() -> None:
    client = Answering(failing=1)
    samples = await sent(client, talk(0, [1], [2], [3]), talk(1, [4], [5]))
    assert [job.seed for job in client.jobs] == [0, 1, 10, 11]
    assert [sample.error for sample in samples] == ["", "QUEUE_FULL", "", ""]


async def test_branches_go_on_side_by_side_and_the_turn_that_joins_them_waits() -> None:
    client = Answering(together=2)
    early, joined, free, fork = talk(3, "early"), talk(3, "join", "ed"), talk(3, "free"), talk(3, " fork")
    branches = Branch(joined, join_at=2), Branch(free), Branch(fork, inherits=True)
    first, second, third = talk(3, "a", "b", "c").turns
    root = Conversation(3, (first, replace(second, branches=branches), third), branches=(Branch(early),))
    samples = await sent(client, root)
    by_prompt = dict(zip([job.prompt for job in client.jobs], samples, strict=True))
    turns = {"early": 0, "a": 0, "a!b": 1, "join": 0, "free": 0, "a!b! fork": 2, "join!ed": 1, "a!b!c": 2}
    assert {prompt: sample.turn for prompt, sample in by_prompt.items()} == turns
    assert len(samples) == root.num_requests and {job.session for job in client.jobs} == {"conversation-3"}
    assert by_prompt["a!b!c"].due >= by_prompt["join!ed"].end
    assert by_prompt["free"].due == by_prompt["a!b! fork"].due == by_prompt["a!b"].end


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_closed_loop_keeps_its_clients_busy(concurrency: int) -> None:
    client = Answering(together=concurrency)
    await sent(client, *(talk(i, [i], [i]) for i in range(9)), concurrency=concurrency)
    assert client.most == concurrency and len(client.jobs) == 18


async def test_think_time_is_not_latency() -> None:
    client = Answering()
    first, second = await sent(client, talk(0, [1], [2], think_s=0.05))
    assert second.due == pytest.approx(first.end + 0.05)
    assert client.starts[1] >= second.due


async def test_an_open_loop_begins_on_time_whatever_is_running() -> None:
    """The first conversations are not answered before the last one has begun, and concurrency is not asked."""
    client = Answering(together=8)
    samples = await sent(client, *(talk(i, [i], [i], start_s=0.02 * (i // 4)) for i in range(8)))
    dues = sorted(sample.due for sample in samples if sample.turn == 0)
    assert [due - dues[0] for due in dues] == pytest.approx([0.0] * 4 + [0.02] * 4)
    assert all(start >= due for start, due in zip(client.starts[:8], dues, strict=True))
    assert len(client.jobs) == 16


async def test_an_open_loop_may_be_bounded() -> None:
    """Five are due at once and two may run: the client answers after two have been there together."""
    client, done = Answering(together=2), []
    plan = Plan(tuple(talk(i, [i], start_s=0.0) for i in range(5)))
    samples = await send(client, plan, 1, lambda: done.append(1), most=2)
    assert (len(samples), len(done), client.most) == (5, 5, 2)
    assert len({sample.due for sample in samples}) == 1, "what a conversation waits is part of its latency"
