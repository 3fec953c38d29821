"""The judge of the duel before Millrace, over HTTP: a worker with noise reads pages of other requests."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from millrace_bench.duel import __main__ as duel
from millrace_bench.duel import control as judge
from millrace_bench.duel import millrace
from millrace_bench.duel.load import KINDS, Clients, write_model
from millrace_bench.pd_load import Load, Segment
from millrace_cli.cluster import ClusterSpec
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.step import torch_runner
from millrace_serve.engine.step.batch import BatchBuilder, SlotUpdates
from millrace_testing.cluster import SMALL
from millrace_testing.inside_cluster import InsideCluster

SEGMENT = Segment(Load.parse("100/60@8"), 8.0, 2.0, seed=1)


def exchange_pages(patch: pytest.MonkeyPatch) -> set[object]:
    """Half of the sequences read the first page of an earlier one, from their next page on. Returns them."""
    updates, before, found = BatchBuilder._updates, [0], set()

    def exchanged(builder: BatchBuilder, plan: Plan) -> SlotUpdates[np.ndarray]:
        made = updates(builder, plan)
        for seq in set(plan.grown) - set(plan.joined):
            if seq.tokens[1] % 2 and before[0] not in seq.pages:  # behind the token that begins a text
                found.add(seq.id)
                also = {"page_slots": seq.slot, "page_indexes": 0, "pages": before[0]}
                more = {
                    name: np.append(was := getattr(made, name), one).astype(was.dtype) for name, one in also.items()
                }
                made = dataclasses.replace(made, **more)
        before[:] = [seq.pages[0] for seq in plan.joined][-1:] or before
        return made

    patch.setattr(BatchBuilder, "_updates", exchanged)
    return found


@pytest.mark.e2e
@pytest.mark.long
async def test_pages_of_other_requests_are_found_in_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, numbers, sample = write_model(tmp_path / "duel", "tiny", 2), itertools.count(), torch_runner.sample
    monkeypatch.setattr(
        torch_runner, "sample", lambda logits, *more: sample(logits.add_(0.02 * torch.randn(logits.shape)), *more)
    )
    for name, value in {"PLACES": 30, "ASKED": 30, "JUDGING_S": 1e9}.items():
        monkeypatch.setattr(judge, name, value)
    args = duel.parsed(["--server", "millrace-single", "--loads", "64/8@1"])
    own = {"worker_set": ("random_weights=true", *SMALL), "router_set": (f"api_keys={tmp_path / 'keys.json'}",)}
    layout = millrace.layout(0, 0, 1, args, tmp_path / "duel", 256)
    async with InsideCluster(ClusterSpec(0, 0, unified=1, model=tmp_path / "duel", **own)) as cluster:
        layout = dataclasses.replace(layout, url=f"http://{cluster.address('router', 'http')}")

        async def sent() -> Clients:
            clients = Clients(layout, vocabulary, list(KINDS), 600.0, next(numbers), judged=True)
            await clients.load(SEGMENT)
            return clients

        first, second, quiet = [await sent() for _ in range(3)]
        with monkeypatch.context() as patch:
            exchanged = exchange_pages(patch)
            struck = await sent()
        control = judge.Control(first, list(KINDS), lambda: Clients(layout, vocabulary, [], 600.0, next(numbers)))
        rows = await control.measure([second])
        found = [await control.conclude(0.0, one, whole=True) for one in (quiet, struck)]
    assert all(row["told"] for row in rows), rows
    assert found[0]["differ"] > 5 and (found[0]["wrong"], found[0]["cannot_be_told"]) == (0, 0)
    assert len(exchanged) > 3 and found[1]["wrong"] == len(exchanged), found
