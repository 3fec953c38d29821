"""The step's arrays against the plainest way to write them."""

import numpy as np
from engine.harness import Driver, canaries, request
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import RequestId
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.step.batch import BatchBuilder, SlotUpdates, StepBatch
from millrace_serve.model.context_parallel.split import Split

SIZE = 4


class Rows:
    """The slots of a device, in plain Python, and the rows that a step makes of them."""

    def __init__(self) -> None:
        self.length: dict[int, int] = {}
        self.capacity: dict[int, int] = {}
        self.pages: dict[tuple[int, int], int] = {}

    def update(self, updates: SlotUpdates) -> None:
        cells = zip(updates.page_slots.tolist(), updates.page_indexes.tolist(), strict=True)
        self.pages.update(zip(cells, updates.pages.tolist(), strict=True))
        self.capacity.update(zip(updates.grown.tolist(), updates.capacity.tolist(), strict=True))
        self.length.update(zip(updates.joined.tolist(), updates.lengths.tolist(), strict=True))

    def of(self, batch: StepBatch) -> list[tuple[int, int]]:
        """(position, KV slot) of every row of a step without drafts."""
        rows = []
        lens = [1] * batch.num_decode if batch.is_decode else np.diff(batch.cu_q).tolist()
        for slot, count in zip(batch.slots.tolist(), lens, strict=True):
            for _ in range(count):
                position = self.length[slot]
                assert position < self.capacity[slot]
                rows.append((position, self.pages[slot, position // SIZE] * SIZE + position % SIZE))
                self.length[slot] += 1
        return rows


def expected_rows(plan: Plan) -> list[tuple[int, int]]:
    """(position, KV slot) of every row."""
    spans = [(seq, seq.num_reserved - 1, seq.num_reserved) for seq in plan.decode]
    spans += [(chunk.seq, chunk.start, chunk.end) for chunk in plan.chunks]
    return [
        (position, seq.pages[position // SIZE] * SIZE + position % SIZE)
        for seq, start, end in spans
        for position in range(start, end)
    ]


def watch(driver: Driver, batches: list[StepBatch]) -> None:
    """Check every batch that the engine builds."""
    builder: BatchBuilder = driver.engine._builder
    build, device = builder.build, Rows()

    def checked(plan: Plan, num_queries: int, split: Split | None = None) -> StepBatch:
        batch = build(plan, num_queries, split)
        if batch.updates is not None:
            device.update(batch.updates)
        assert device.of(batch) == expected_rows(plan)
        check_rows(plan, batch)
        check_sampling(plan, batch)
        batches.append(batch)
        return batch

    builder.build = checked  # type: ignore[method-assign]


def check_rows(plan: Plan, batch: StepBatch) -> None:
    seqs = plan.decode + [chunk.seq for chunk in plan.chunks]
    assert batch.slots.tolist() == [seq.slot for seq in seqs]
    lens = [1] * len(plan.decode) + [chunk.end - chunk.start for chunk in plan.chunks]
    assert batch.cu_q.tolist() == (np.cumsum([0, *lens]).tolist() if plan.chunks else [])
    assert batch.chunk_ends == tuple(chunk.end for chunk in plan.chunks)
    assert batch.chunk_tokens.tolist() == [t for c in plan.chunks for t in c.seq.tokens[c.start : c.end]]
    assert (batch.num_decode, batch.num_tokens) == (len(plan.decode), sum(lens))
    assert batch.num_rows.tolist() == [batch.num_tokens]
    longest = max([seq.num_reserved for seq in plan.decode] + [chunk.end for chunk in plan.chunks])
    assert batch.num_pages == -(-longest // SIZE)


def check_sampling(plan: Plan, batch: StepBatch) -> None:
    samples, last = list(range(len(plan.decode))), len(plan.decode) - 1
    for chunk in plan.chunks:
        last += chunk.end - chunk.start
        samples += [last] if chunk.samples else []
    assert batch.sample_rows.tolist() == samples
    sampling = plan.decode + [chunk.seq for chunk in plan.chunks if chunk.samples]
    assert batch.sample_slots.tolist() == [seq.slot for seq in sampling]
    params = [seq.request.sampling for seq in sampling]
    if batch.sampling is None:
        assert not any(one.temperature for one in params)
        return
    assert batch.sampling.seeds.tolist() == [one.seed for one in params]
    assert np.array_equal(batch.sampling.temperature, np.float32([one.temperature for one in params]))


def test_every_batch_of_a_busy_engine():
    driver, batches = Driver(Role.UNIFIED, num_pages=12, max_running=4), []
    watch(driver, batches)
    for room in range(12):
        tokens = [20 + room % 3] * (1 + room * 5 % 17)
        driver.submit(request(room, tokens, max_tokens=9, temperature=room % 2 / 2, seed=2**63 + room))
    driver.run_out()
    assert any(batch.num_decode and batch.chunk_lens for batch in batches), "no mixed step"
    assert any(batch.sampling is None for batch in batches) and any(batch.sampling is not None for batch in batches)
    assert driver.scheduler.outbox.counters["preemptions"] > 0


def test_canaries_follow_the_known_tokens():
    driver, batches = Driver(Role.UNIFIED, overlap=True, max_prefill_tokens=100), []
    watch(driver, batches)
    prompt = [20, 21, 22, 23, 24, 25, 26]
    driver.run(request(1, prompt, max_tokens=4))
    first, second, third = (batch.canary for batch in batches[:3])
    assert first.expected[:, :, -1].tolist() == [[0, 0]]  # new pages hold nothing yet
    assert first.write_words.tolist() == canaries(prompt, SIZE).tolist()
    assert len(second.write_pages) == 0  # its token is sampled by the step that is running
    tokens = prompt + driver.tokens[RequestId(1, 0)]
    assert third.write_words.tolist() == canaries(tokens[:8], SIZE)[1:].tolist()


def test_idle_batch_has_no_rows():
    batch = StepBatch.idle()
    assert batch.num_tokens == 0 and len(batch.sample_rows) == 0 and batch.sampling is None
