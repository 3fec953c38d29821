"""The comparison of topologies: its loads, its systems, and a small run."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest
from millrace_bench import pd
from millrace_bench.pd import LOADS, Load, line, parser, runs, spec
from millrace_cli.cluster import TINY
from millrace_load import plots


def test_loads() -> None:
    assert Load.parse("4096/256@0.5,1") == Load(4096, 256, 1, (0.5, 1.0))
    talk = Load.parse("500/100x5@2")
    assert (talk.name, talk.longest) == ("500 in, 100 out, 5 turns", 3000)
    settings = talk.settings(2.0, 7, "here:1", parser().parse_args(["--seconds", "10"]))
    assert (settings.num_requests, settings.multi_turn, settings.request_rate) == (4, 5, 0.4), "20 requests, 2 a second"
    rates = Load.parse("64/16@1,2")
    args = parser().parse_args(["--warmup", "3"])
    assert [rates.settings(rate, 0, "here:1", args).warmup for rate in rates.rates] == [3, 0], "once for a load"
    loads = [Load.parse(text) for text in LOADS]
    assert len(loads) == 3 and loads[2].turns > 1 and all(len(load.rates) == 4 for load in loads)
    assert [rate for _, rate in runs(loads[:1])] == list(loads[0].rates)


@pytest.mark.parametrize("text", ["4096@1", "4096/256", "0/4@1", "4/4x0@1", "4/4@0", "4/4@1,,2", "a/b@1", "4/4@1.2.3"])
def test_bad_loads_are_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["--loads", text])
    assert caught.value.code == 2 and "--loads" in capsys.readouterr().err


def test_a_bad_picture_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--plot", "goodput.pdf"])
    assert "must end in .svg or .png" in capsys.readouterr().err


def test_topologies_use_two_gpus_each() -> None:
    options = "--loads 64/16@1 --worker-set device=cuda --local-prefill-tokens 99 --local-prefill-wait 0.7"
    args = parser().parse_args(options.split())
    specs = {name: spec(name, TINY, args) for name in pd.TOPOLOGIES}
    assert all(len(one.workers()) == 2 for one in specs.values())
    assert list(specs["unified"].workers().values()) == ["unified"] * 2
    local = {"routing.local_prefill_tokens=99", "routing.local_prefill_wait=0.7"}
    assert [local & set(one.router_set) for one in specs.values()] == [set(), set(), local]
    for one in specs.values():
        assert one.worker_set == ("limits.max_model_len=80", "random_weights=true", "device=cuda")
        assert set(pd.POLICIES) <= set(one.router_set)


@pytest.mark.e2e
@pytest.mark.xdist_group("e2e")
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--engine sim --loads 200/8@20 40/4x2@10 --seconds 0.5 --warmup 1 --think-time 0 --slo ttft=60"
    args = parser().parse_args([*options.split(), "--topologies", "conditional"])
    record = json.loads(pd.run(args, tmp_path).to_json())
    rows = record["results"]["rows"]
    assert record["results"]["failed"] == {}
    names = ["200 in, 8 out", "40 in, 4 out, 2 turns"]
    assert [(row["topology"], row["load"]) for row in rows] == [("conditional", name) for name in names]
    assert [(row["completed"], row["errors"]) for row in rows] == [(10, {}), (4, {})]
    assert all(row["goodput"] == row["request_throughput"] and row["slo_met"] == 1 for row in rows)
    ways = [row["ways"] for row in rows]
    assert [sum(taken.values()) for taken in ways] == [11, 5], "with the warm-up"
    assert set(ways[0]) <= {"pair", "local"} and ways[1]["local"] > 0
    assert capsys.readouterr().out.splitlines() == [line(row) for row in rows]
    drawn = plots.lines(plots.points(record))
    assert {load: set(systems) for load, systems in drawn.items()} == {name: {"conditional"} for name in names}


def test_rates_that_were_over_count_when_the_limit_ends_a_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(topology: str, model: Path, args: argparse.Namespace, rows: list[pd.Row]) -> None:
        rows.append({"topology": topology})
        await asyncio.sleep(60)

    monkeypatch.setattr(pd, "measure", measure)
    args = parser().parse_args(["--engine", "sim", "--topologies", "pair", "unified", "--limit", "0.1"])
    results = pd.run(args, tmp_path).results
    assert results["rows"] == [{"topology": "pair"}, {"topology": "unified"}]
    assert list(results["failed"]) == ["pair", "unified"]


def test_a_system_that_does_not_start_is_in_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = parser().parse_args(["--engine", "sim", "--topologies", "pair", "--limit", "0.01"])
    results = pd.run(args, tmp_path).results
    assert results == {"rows": [], "failed": {"pair": "not done after 0 s"}}
    assert "not done" in capsys.readouterr().out
