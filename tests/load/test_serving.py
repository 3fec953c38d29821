"""A load run against a real router with simulated workers."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from millrace_cli.cluster import ClusterSpec
from millrace_load import serving
from millrace_load.record import ROOT
from millrace_load.serving import collect, collect_batches
from millrace_load.serving_options import Settings, parse
from millrace_testing.inside_cluster import InsideCluster
from rich.console import Console


def test_options_are_the_fields() -> None:
    settings = parse(["--api", "http", "--num-requests", "5", "--input-len", "1:9", "--unified", "--slo", "ttft=1"])
    assert settings == Settings(api="http", num_requests=5, input_len="1:9", unified=True, slo="ttft=1")
    assert parse([]) == Settings()
    assert parse(["--worker-set", "sim.step_s=0.1", "dp=2"]).worker_set == ["sim.step_s=0.1", "dp=2"]
    assert parse(["--batches", "1", "8"]).batches == [1, 8]


def test_a_bad_trace_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9}\n')
    monkeypatch.setattr(sys, "argv", ["serving", "--self-serve", "--trace", str(trace)])
    monkeypatch.setattr(serving, "LocalCluster", None)
    with pytest.raises(SystemExit) as caught:
        serving.main()
    assert caught.value.code == f"{trace}:1: output_length: Field required"


def test_a_closed_loop_of_conversations_over_a_system_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--concurrency", "8", "--multi-turn", "3", "--num-requests", "10", "--input-len", "80:120"]
    options = ["--self-serve", "--engine", "sim", "--ignore-eos", "--warmup", "4", "--output-len", "16", "--seed", "3"]
    monkeypatch.setattr(serving, "LocalCluster", InsideCluster)
    monkeypatch.setattr(sys, "argv", ["serving", *options, *sizes])
    serving.main()
    result = capsys.readouterr()
    record: dict[str, Any] = json.loads(result.out.splitlines()[-1])
    figures = record["results"]
    assert (figures["errors"], figures["left_out"], figures["unsent"]) == ({}, 0, 0)
    assert (figures["completed"], figures["output_tokens"]) == (30, 30 * 16)
    assert figures["prompt_tokens"] >= 30 * 80
    assert 0 < figures["ttft"]["p50"] <= figures["request_latency"]["p50"]
    assert record["config"]["target"]["model"] == "tiny"
    assert "goodput" in figures and len(figures["turns"]) == 3
    assert "TTFT" in result.err and "Turns" in result.err
    for earlier, later in itertools.pairwise(figures["turns"]):
        assert later["prompt_tokens"] >= earlier["prompt_tokens"] + 10 * (80 + 16), "with the question and the answer"
        assert later["cached_share"] > 0, "a page of the first question at least"


async def test_open_loops_traces_and_batches(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [0, 1, last]} for last in (2, 3)]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = [("human", "time and people"), ("gpt", "a way"), ("human", " and a year"), ("gpt", "a day")]
    sharegpt = tmp_path / "sharegpt.json"
    sharegpt.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))

    settings = ("sim.step_s=0.002",)
    async with InsideCluster(ClusterSpec(engine="sim", worker_set=settings)) as cluster:

        async def figures(**options: Any) -> list[tuple[int, int, int]]:
            settings = Settings(warmup=0, ignore_eos=True, **options)
            run = await collect(settings, Console(quiet=True))
            assert not any(sample.error for sample in run.samples)
            return [(sample.prompt_tokens, sample.cached_tokens, sample.output_tokens) for sample in run.samples]

        replay = {"address": cluster.grpc_address, "trace": str(mooncake)}
        assert await figures(num_requests=1, **replay) == [(1030, 0, 3)]
        assert await figures(**replay) == [(1030, 1024, 3)] * 2, "the second begins with the two blocks of the first"
        agents = {"trace": str(ROOT / "tests/load/agents.jsonl"), "num_requests": 2, "speed": 1e6}
        turns = await figures(**(replay | agents))
        assert len(turns) == 5 and sorted(output for _, _, output in turns) == [3, 4, 5, 6, 7]
        assert turns[-1][1] > 0, "a later turn finds the one before it"

        for api, address in (("grpc", cluster.grpc_address), ("http", cluster.http_url)):
            first, second = await figures(api=api, address=address, sharegpt=str(sharegpt), multi_turn=5)
            (single,) = await figures(api=api, address=address, sharegpt=str(sharegpt))
            assert single == first and first[2] >= 2 and second[2] >= 2
            assert second[0] > first[0] + first[2] >= 5

        loop = {"request_rate": 100.0, "max_concurrency": 4, "num_requests": 30, "shared_prefix": "1:64"}
        sizes = {"input_len": "80:120", "output_len": "16"}
        opened = await figures(api="http", address=cluster.http_url, **loop, **sizes)
        assert [output for _, _, output in opened] == [16] * 30 and min(opened)[0] >= 64 + 80

        batches = Settings(batches=(1, 3), rounds=2, warmup=1, input_len="70", output_len="5", ignore_eos=True)
        for api, address in (("grpc", cluster.grpc_address), ("http", cluster.http_url)):
            _, rows = await collect_batches(replace(batches, api=api, address=address), Console(quiet=True))
            assert [(row.batch, row.errors, row.output_tokens) for row in rows] == [
                (size, 0, 5 * size) for size in (1, 1, 3, 3)
            ]
            for row in rows:
                assert row.input_tokens >= 70 * row.batch and 0 < row.ttft < row.latency
