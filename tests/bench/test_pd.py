"""The comparison of topologies: its loads, its systems, and small runs."""

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from millrace_bench import pd
from millrace_bench.pd import LOADS, line, parsed, spec
from millrace_bench.pd_load import Load, Segment, changing
from millrace_cli.cluster import TINY, LocalCluster
from millrace_load import plots
from millrace_load.clients import Sample, Target
from millrace_load.report import Slo
from millrace_testing.inside_cluster import InsideCluster


def test_loads() -> None:
    assert Load.parse("4096/256@0.5,1") == Load(4096, 256, 1, (0.5, 1.0))
    talk = Load.parse("500/100x5@2")
    assert (talk.name, talk.longest) == ("500 in, 100 out, 5 turns", 3000)
    loads = [Load.parse(text) for text in LOADS]
    assert len(loads) == 3 and loads[2].turns > 1 and all(len(load.rates) == 4 for load in loads)


def test_arrivals_are_within_the_time_of_their_load() -> None:
    plan = Segment(Load.parse("8/4x2@40"), 40.0, 5.0, 3, begin_s=7.0).plan(Target("tiny", 100, 64), "0")
    starts = [conversation.start_s or 0.0 for conversation in plan.conversations]
    assert all(7.0 <= start < 12.0 for start in starts) and starts == sorted(starts)
    assert 70 < len(starts) < 130 and {len(one.turns) for one in plan.conversations} == {2}, "40 requests a second"


def test_loads_change_in_turn() -> None:
    segments = changing([Load.parse("8/4@1"), Load.parse("9/4@2")], 30.0, 2, 5)
    assert [(one.load.input_len, one.rate, one.begin_s, one.seconds) for one in segments] == [
        (8, 1.0, 0.0, 30.0), (9, 2.0, 30.0, 30.0), (8, 1.0, 60.0, 30.0), (9, 2.0, 90.0, 30.0),
    ]  # fmt: skip
    assert len({one.seed for one in segments}) == 4


def test_goodput_is_of_the_requests_that_are_due_within_the_time() -> None:
    """A late turn of a conversation, and requests that miss a limit, do not count; the time does not grow by a tail."""

    def sample(due: float, ttft: float) -> Sample:
        return Sample(due, [due + ttft, due + ttft + 50.0], output_tokens=2000, end=due + ttft + 50.0)

    samples = [sample(101.0, 0.5), sample(104.0, 0.5), sample(104.5, 2.0), sample(106.0, 0.5)]
    row = Segment(Load.parse("8/4@1"), 1.0, 4.0, 0, begin_s=1.0).row(samples, 100.0, Slo(ttft=1.0))
    assert (row["goodput"], row["requests"], row["completed"]) == (0.5, 3, 3)


@pytest.mark.parametrize(
    ("topology", "roles"),
    [
        ("3p+1d", {"prefill": 3, "decode": 1}),
        ("4u", {"unified": 4}),
        ("1p+1d+2u", {"prefill": 1, "decode": 1, "unified": 2}),
        ("4flex", {"flexible": 4}),
    ],
)
def test_a_topology_is_its_workers(topology: str, roles: dict[str, int]) -> None:
    args = parsed(["--loads", "64/16@1", "--worker-set", "device=cuda"])
    found = spec(topology, TINY, args)
    assert Counter(found.workers().values()) == roles
    assert found.worker_set == ("limits.max_model_len=80", "random_weights=true", "device=cuda")
    assert found.router_set == (*pd.POLICIES, "routing.slo.ttft=1.0", "routing.slo.tpot=0.04")


def test_every_router_of_a_cluster_has_a_name() -> None:
    made = LocalCluster(spec("1p+1d", TINY, parsed(["--routers", "3"])))
    assert made.routers == ("router", "router-1", "router-2")
    assert [name for name, role in made.roles.items() if role == "router"] == [*made.routers]


SMALL = "--engine sim --loads 200/8@20 40/4x2@10 --seconds 0.5 --warmup 1 --think-time 0 --slo ttft=60"


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two client processes before two routers."""
    monkeypatch.setattr(pd, "LocalCluster", InsideCluster)
    args = parsed([*SMALL.split(), "--topologies", "1p+1d", "--clients", "2", "--routers", "2"])
    record = json.loads(pd.run(args, tmp_path).to_json())
    rows = record["results"]["rows"]
    assert record["results"]["failed"] == {}
    names = ["200 in, 8 out", "40 in, 4 out, 2 turns"]
    assert [(row["topology"], row["load"], row["errors"]) for row in rows] == [("1p+1d", name, {}) for name in names]
    assert all(row["completed"] == row["requests"] > 0 and row["slo_met"] == 1 for row in rows)
    assert [row["goodput"] for row in rows] == [row["requests"] / 0.5 for row in rows]
    ways = rows[0]["ways"]
    assert sum(ways.values()) == rows[0]["requests"] + 1 and set(ways) <= {"pair", "local"}, "with the warm-up"
    assert capsys.readouterr().out.splitlines() == [line(row) for row in rows]
    drawn = plots.lines(plots.points(record))
    assert {load: set(systems) for load, systems in drawn.items()} == {name: {"1p+1d"} for name in names}


def test_rates_that_were_over_count_when_the_limit_ends_a_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(topology: str, model: Path, args: argparse.Namespace, rows: list[pd.Row]) -> None:
        rows.append({"topology": topology})
        await asyncio.sleep(60)

    monkeypatch.setattr(pd, "measure", measure)
    args = parsed(["--engine", "sim", "--topologies", "1p+1d", "2u", "--limit", "0.1"])
    results = pd.run(args, tmp_path).results
    assert results["rows"] == [{"topology": "1p+1d"}, {"topology": "2u"}]
    assert results["failed"] == dict.fromkeys(["1p+1d", "2u"], "not done after 0 s")
