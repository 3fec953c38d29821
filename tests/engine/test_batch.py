"""The step's arrays against the plainest way to write them."""

from __future__ import annotations

import numpy as np
from engine.harness import Driver, request
from millrace_common.page_hash import chain_hash, page_hashes
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import RequestId
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.step.batch import BatchBuilder, StepBatch

SIZE = 4


def expected_rows(plan: Plan) -> list[tuple[int, int, int]]:
    """(token, position, kv slot) of every row; token None stands for one taken from the slot."""
    rows = []
    for seq in plan.decode:
        position = seq.num_scheduled - 1
        rows.append((-1 - seq.slot, position, seq.pages[position // SIZE] * SIZE + position % SIZE))
    for chunk in plan.chunks:
        for position in range(chunk.start, chunk.end):
            page = chunk.seq.pages[position // SIZE]
            rows.append((chunk.seq.tokens[position], position, page * SIZE + position % SIZE))
    return rows


def watch(driver: Driver, batches: list[StepBatch]) -> None:
    """Check every batch that the engine builds."""
    builder: BatchBuilder = driver.engine._builder
    build = builder.build

    def checked(plan: Plan) -> StepBatch:
        batch = build(plan)
        rows = expected_rows(plan)
        found = zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.kv_slots.tolist(), strict=True)
        assert list(found) == rows
        seqs = plan.decode + [chunk.seq for chunk in plan.chunks]
        ends = [seq.num_scheduled for seq in plan.decode] + [chunk.end for chunk in plan.chunks]
        assert batch.seq_lens.tolist() == ends
        assert batch.q_lens.tolist() == [1] * len(plan.decode) + [chunk.end - chunk.start for chunk in plan.chunks]
        assert batch.num_decode == len(plan.decode)
        for row, (seq, end) in enumerate(zip(seqs, ends, strict=True)):
            used = -(-end // SIZE)
            assert batch.page_table[row, :used].tolist() == seq.pages[:used]
        samples = [row for row, seq in enumerate(plan.decode)]
        last = len(plan.decode) - 1
        for chunk in plan.chunks:
            last += chunk.end - chunk.start
            samples += [last] if chunk.samples else []
        assert batch.sample_rows.tolist() == samples
        sampling = plan.decode + [chunk.seq for chunk in plan.chunks if chunk.samples]
        assert batch.sample_slots.tolist() == [seq.slot for seq in sampling]
        positions = batch.positions[batch.sample_rows]
        assert batch.sampling.output_index.tolist() == [
            position + 1 - seq.num_prompt for position, seq in zip(positions.tolist(), sampling, strict=True)
        ]
        assert batch.sampling.seeds.tolist() == [seq.request.sampling.seed for seq in sampling]
        assert np.array_equal(
            batch.sampling.temperature, np.float32([seq.request.sampling.temperature for seq in sampling])
        )
        batches.append(batch)
        return batch

    builder.build = checked  # type: ignore[method-assign]


def test_every_batch_of_a_busy_engine():
    driver, batches = Driver(Role.UNIFIED, num_pages=12, max_running=4), []
    watch(driver, batches)
    for room in range(12):
        tokens = [20 + room % 3] * (1 + room * 5 % 17)
        driver.submit(request(room, tokens, max_tokens=9, temperature=room % 2 / 2, seed=2**63 + room))
    driver.run()
    driver.check_whole()
    assert any(batch.num_decode and batch.num_decode < len(batch.q_lens) for batch in batches), "no mixed step"
    assert driver.roster.totals["preemptions"] > 0


def test_canaries_follow_the_known_tokens():
    driver, batches = Driver(Role.UNIFIED, overlap=True, max_prefill_tokens=100), []
    watch(driver, batches)
    prompt = [20, 21, 22, 23, 24, 25, 26]
    driver.submit(request(1, prompt, max_tokens=4))
    driver.run()
    first, second, third = (batch.canary for batch in batches[:3])
    assert first.expected[:, :, 1].tolist() == [[0, 0]]  # new pages hold nothing yet
    assert first.write_words.tolist() == [
        [value, count] for value, count in zip(page_hashes(prompt, SIZE), (4, 3), strict=True)
    ]
    assert len(second.write_pages) == 0  # its token is sampled by the step that is running
    tokens = prompt + driver.tokens[RequestId(1, 0)]
    assert third.write_words.tolist() == [[chain_hash(page_hashes(prompt, SIZE)[0], tokens[4:8]), 4]]


def test_an_idle_batch_has_no_rows():
    batch = StepBatch.idle()
    assert batch.num_tokens == 0 and len(batch.sample_rows) == 0 and batch.page_table.shape == (0, 1)
