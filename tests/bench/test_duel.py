"""The duel of servers: what it concludes, the adapters of servers, and the shapes that SGLang answers with."""

import argparse
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from millrace_bench.duel import __main__ as duel
from millrace_bench.duel import aiperf, millrace, sglang
from millrace_bench.duel.evidence import WORD, Judged
from millrace_bench.duel.faults import TIMETABLE, timetable
from millrace_bench.duel.judge import HUNG, Key, compare, conclude, error_free_s
from millrace_bench.duel.load import JUDGED, NO_WORDS, Clients, write_model
from millrace_bench.duel.parts import Layout, Part, Running
from millrace_bench.pd_load import Load, Segment
from millrace_cli.cluster import StartError
from millrace_load.clients import Job, Sample
from millrace_rpc.http_server import HttpServer
from millrace_testing.paths import ROOT
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

# ------------------------------------------------------------------------------------- what is wrong, and how long


def sample(text: str, error: str = "", due: float = 0.0, end: float = 0.0) -> Sample:
    return Sample(due, [due] if text else [], text=text, error=error, end=end or due)


CONTROL = sample("abcd")


@pytest.mark.parametrize(
    ("control", "run", "answers", "differs"),
    [
        (CONTROL, sample("abcd"), 1, False),
        (CONTROL, sample("abce"), 1, True),
        (CONTROL, sample("abc"), 1, True),  # whole, it says
        (CONTROL, sample("abc", "CUT"), 1, False),  # a beginning
        (CONTROL, sample("abc\ufffd", "CUT"), 1, False),
        (CONTROL, sample("x", "CUT"), 1, True),
        (CONTROL, sample("abcdx", HUNG), 1, True),
        (CONTROL, sample("", "NO_WORKERS"), 0, False),
        (sample("ab", "CUT"), sample("abcd"), 0, False),  # nobody knows the right answer
    ],
)
def test_an_answer_beside_its_control(control: Sample, run: Sample, answers: int, differs: bool) -> None:
    assert compare({(0, 0): control}, {(0, 0): run}) == (answers, [(0, 0)] * differs)


def test_only_requests_of_the_kind_and_of_both_runs_are_compared() -> None:
    control: dict[Key, Sample] = {(index, 0): CONTROL for index in range(7)}
    run: dict[Key, Sample] = {(index, 0): sample("abcd" if index % 3 else "x") for index in range(1, 9)}
    found = [compare(control, run, kind, 3) for kind in range(3)]
    assert found == [(2, [(3, 0), (6, 0)]), (2, []), (2, [])]


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        ([], 0.0),
        ([sample("a", due=12.0, end=13.0)], 0.0),
        ([sample("", "E", due=5.0, end=8.0), sample("a", due=12.0)], 0.0),  # before the strike
        ([sample("", "E", due=9.0, end=14.0), sample("a", due=12.0)], 4.0),
        ([sample("", "E", due=11.0, end=12.0), sample("", "E", due=15.0, end=16.5), sample("a", due=17.0)], 6.5),
        ([sample("a", due=11.0), sample("", "E", due=15.0, end=16.0)], None),
    ],
)
def test_seconds_until_error_free(samples: list[Sample], seconds: float | None) -> None:
    assert error_free_s(10.0, samples) == seconds


def test_the_row_of_a_fault() -> None:
    run: dict[Key, Sample] = {
        (0, 0): sample("abcx", due=11.0),
        (1, 0): sample("ab", HUNG, due=12.0, end=20.0),
        (2, 0): sample("", "NO_WORKERS", due=13.0, end=13.0),
        (3, 0): sample("", due=13.0, end=14.0),
        (4, 0): sample("z", due=30.0, end=31.0),
    }
    judged = Judged(places=5, wrong=1, not_judged=2, most=3.0)
    alone = {"requests": 5, "differ": 4, "hung": 1, "errors": {"NO_WORKERS": 1, "EMPTY": 1}, "error_free_s": 10.0}
    assert conclude(10.0, run, 4, judged, 1) == alone | asdict(judged) | {"cannot_be_told": 1}


# ------------------------------------------------------------------------------------- servers and faults

ARGS = argparse.Namespace(
    device="cuda", engine="model", slo="ttft=1,tpot=0.04", worker_set=["kv_dtype=fp8"], peer=["--watchdog-timeout", "9"]
)
ALL = [fault.name for fault in TIMETABLE]
STRUCK = {
    "millrace-pair": ["prefill-0", "decode-0", "prefill-0", "decode-0", "decode-0", "decode-0", "", "router"],
    "millrace-unified": ["unified-0", "unified-0", "unified-0", "unified-0", "", "router"],
    "sglang-pair": ["prefill-0", "decode-1", "prefill-0", "decode-1", "decode-1", "decode-1", "", "router"],
    "sglang-unified": ["unified-0", "unified-0", "unified-0", "unified-0", "", "router"],
    "sglang-single": ["unified-0", "unified-0", "unified-0", "unified-0", ""],
}


def layout(server: str, folder: Path) -> Layout:
    return duel.SERVERS[server](ARGS, folder / "duel", 600)


def test_the_timetable_is_published() -> None:
    section = (ROOT / "docs" / "duel.md").read_text().partition("## Timetable")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE) == ALL


@pytest.mark.parametrize("server", STRUCK)
def test_each_fault_has_a_victim_once(server: str, tmp_path: Path) -> None:
    found = timetable(layout(server, tmp_path).parts)
    assert [victim.name if victim else "" for _, victim in found] == STRUCK[server]
    assert "leave" in (names := [fault.name for fault, _ in found]) and names == sorted(names, key=ALL.index)


@pytest.mark.parametrize("server", duel.SERVERS)
def test_parts_listen_on_ports_of_their_own_and_runs_are_apart(server: str, tmp_path: Path) -> None:
    made = layout(server, tmp_path)
    workers = [part for part in made.parts if part.role != "router"]
    assert made.gpus == (2 if server.endswith("-dp") else len(workers))
    assert len({part.ready for part in made.parts}) == len(made.parts) and all(part.metrics for part in workers)
    assert made.apart(1) != made.apart(2)
    words = " ".join(word for part in made.parts for word in part.command)
    asked = ("kv_dtype=fp8", "device=cuda") if "millrace" in server else ("--watchdog-timeout 9", "--load-format")
    assert all(word in words for word in (*asked, str(tmp_path / "duel"), "600"))


@pytest.mark.parametrize(("visible", "gpus"), [(None, "01"), ("", "01"), ("2,3", "23")])
def test_a_pair_of_sglang_hands_over_through_the_port_that_its_gateway_is_told(
    visible: str | None, gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    prefill, decode, router = layout("sglang-pair", tmp_path).parts
    for part, gpu in zip((prefill, decode), gpus, strict=True):
        words = " ".join(part.command)
        assert f"--disaggregation-mode {part.role} --disaggregation-transfer-backend nixl" in words
        assert part.env == {"CUDA_VISIBLE_DEVICES": gpu}
    port = prefill.command[prefill.command.index("--disaggregation-bootstrap-port") + 1]
    told = router.command[router.command.index("--pd-disaggregation") :]
    assert [told[1], told[3], told[4]] == ["--prefill", port, "--decode"] and prefill.ready.startswith(told[2])


HELD = [
    (millrace.HELD, 'millrace_kv_pages{replica="0",use="free"} 90.0', []),
    (millrace.HELD, 'millrace_kv_pages{replica="0",use="running"} 3.0', ["3.0"]),
    (millrace.HELD, 'millrace_kv_pages{replica="1",use="published"} 2.0', ["2.0"]),
    (sglang.HELD, 'sglang:kv_used_tokens{engine_type="unified",model_name="duel"} 64.0', ["64.0"]),
    (sglang.HELD, 'sglang:kv_evictable_tokens{model_name="duel"} 64.0', []),
]


@pytest.mark.parametrize(("pattern", "text", "found"), HELD)
def test_what_metrics_say_is_held(pattern: str, text: str, found: list[str]) -> None:
    assert re.findall(pattern, f"# HELP x\n{text}\n", re.MULTILINE) == found


def test_a_prompt_is_its_token_ids(tmp_path: Path) -> None:
    """So is an answer: any other token is another text."""
    words = write_model(tmp_path, "tiny", 2)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 2048
    assert config["num_key_value_heads"] == config["num_attention_heads"] and not config["num_nextn_predict_layers"]
    assert {"architectures", "scoring_func", "topk_method", "norm_topk_prob"} <= set(config), "which peers read"
    text = "".join(random.Random(0).choices(words, k=200))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == 200 and min(ids) >= NO_WORDS and tokenizer.decode(ids) == text
    assert len(words) == 2048 - NO_WORDS and all(WORD.fullmatch(word) for word in words)
    answer = '["' + text[:60] + '","' + text[60:90]  # of strings
    assert JUDGED["json"]["logit_bias"][str(tokenizer.token_to_id('"'))] == -50
    assert len(tokenizer.encode(answer, add_special_tokens=False).ids) == 23


# ------------------------------------------------------------------------------------- the shapes of SGLang

ERROR = {"object": "error", "message": "out of memory", "param": None}
USAGE = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {"id": "1", "object": "text_completion", "created": 1, "model": "duel", "choices": [choice], "usage": None}


BEGUN, LAST = [chunk(" a"), chunk(" b")], [chunk(" c", "length")]
TOTAL = {**chunk(""), "choices": [], "usage": USAGE}
ABORTED = {"error": {**ERROR, "type": "SERVICE_UNAVAILABLE", "code": 503}}
ANSWERS: dict[str, tuple[list[dict[str, object]] | Response, str, str]] = {  # text and error that a client sees
    "whole": ([*BEGUN, *LAST, TOTAL], " a b c", ""),
    "aborted": ([*BEGUN, ABORTED], " a b", "SERVICE_UNAVAILABLE"),
    "gracefully aborted": ([*BEGUN, chunk("", "abort"), TOTAL], " a b", "ABORT"),
    "cut": (BEGUN, " a b", "CUT"),
    "hung": (BEGUN, " a b", HUNG),
    "refused": (JSONResponse({**ERROR, "type": "BadRequest", "code": 400}, 400), "", "BADREQUEST"),
    "no worker": (JSONResponse({"error": {"code": "no_available_workers"}}, 503), "", "NO_AVAILABLE_WORKERS"),
    "bad gateway": (PlainTextResponse("Bad Gateway", 502), "", "HTTP_502"),
    "text": (JSONResponse({"error": "busy"}, 503), "", "HTTP_503"),
}


async def completions(request: Request) -> Response:
    """What the field `user` names."""
    body = await request.json()
    found, _, _ = ANSWERS[name := body["user"]]
    if isinstance(found, Response):
        return found
    assert body["cache_salt"] == "run-5" and body["temperature"] == 0.0 and body["stream"] is True

    async def events() -> AsyncIterator[str]:
        for event in found:
            yield f"data: {json.dumps(event)}\n\n"
        if name == "hung":
            await asyncio.Event().wait()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answer_of_sglang(name: str, tmp_path: Path) -> None:
    server = HttpServer(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])]))
    url, apart = f"http://127.0.0.1:{server.start('127.0.0.1:0')}", layout("sglang-single", tmp_path).apart
    made = Layout((), url, 1, sglang.HELD, apart)
    clients = Clients(made, [], ["greedy"], 0.5 if name == "hung" else 60.0, number=5)
    clients._fields[0]["user"] = name
    await clients.send(Job(0, " x", 3, 7), one := Sample(0.0))
    await asyncio.gather(clients.close(), server.stop())
    whole, (_, text, error) = name == "whole", ANSWERS[name]
    assert (one.text, one.error, one.answered) == (text, error, whole) and clients.seen == {(0, 0): one}
    assert not whole or (one.prompt_tokens, one.cached_tokens, one.output_tokens) == (9, 8, 3)


# ------------------------------------------------------------------------------------- AIPerf

AIPERF = ROOT / "build" / "peers" / "aiperf" / "bin" / "aiperf"
REPORT = Path(__file__).with_name("aiperf_report.json")  # of AIPerf 0.13.0, without figures that nobody reads


def test_figures_of_a_report_of_aiperf() -> None:
    report = json.loads(REPORT.read_text())
    assert aiperf.figures(report) == {
        **{"version": "0.13.0", "requests": 7, "completed": 5, "errors": {"Service Unavailable": 2}},
        **{"prompt_tokens": 404, "output_tokens": 16},
        **{"goodput": 0.4644, "request_throughput": 0.4644, "output_token_throughput": 1.4861},
        "ttft": pytest.approx({"p50": 0.001751, "p99": 0.0053494}),
        "tpot": pytest.approx({"p50": 0.0101462, "p99": 0.0101602}),
        "request_latency": pytest.approx({"p50": 0.0320285, "p99": 0.0350411}),
    }
    del report["inter_token_latency"]  # answers of one token have none
    assert aiperf.figures(report)["tpot"] == {"p50": None, "p99": None}


def test_aiperf_sends_the_requests_of_our_client(tmp_path: Path) -> None:
    words = [f" w{index:03}" for index in range(500)]
    clients = Clients(layout("sglang-single", tmp_path), words, ["greedy", "json"], 60.0, number=7)
    plan = clients.plan(Segment(Load.parse("40/8x2@4"), 4.0, 3.0, seed=1))
    for one, line in zip(plan.conversations, aiperf.conversations(plan, clients.body), strict=True):
        first, second = line["turns"]
        assert (first["text"], second["text"]) == tuple(turn.said for turn in one.turns)
        assert first["timestamp"] == line["timestamp"] == 1e3 * (one.start_s or 0.0) and second["delay"] == 1000.0
        sent = clients.body(Job(one.index, first["text"], 8, one.turns[0].seed))
        assert first["extra"] == {key: value for key, value in sent.items() if key not in aiperf.WRITES}
        assert first["extra"]["cache_salt"] == "run-7" and first["extra"]["ignore_eos"] is (one.index % 2 == 0)


@pytest.mark.parametrize(
    ("command", "limit_s", "why"),
    [("echo no model; exit 3", 60.0, r"exit code 3\. .*no model"), ("sleep 600", 0.0, "not done after 0 s")],
)
async def test_why_aiperf_or_a_server_has_no_figures(command: str, limit_s: float, why: str, tmp_path: Path) -> None:
    row = await aiperf.report(["sh", "-c", command], tmp_path, limit_s)
    assert list(row) == ["why"] and re.match(why, row["why"], re.DOTALL)
    part = Part("router", "router", ["sh", "-c", command], "http://127.0.0.1:9/")
    with pytest.raises(StartError, match=r"(?s)not ready after \d s\." + (".*no model" if limit_s else "")):
        async with Running(replace(layout("sglang-single", tmp_path), parts=[part]), tmp_path, limit_s).running():
            raise AssertionError("it serves")


# ------------------------------------------------------------------------------------- small, whole

SMALL = "--widths tiny --layers 1 --kinds greedy seeded --loads 40/4x2@4 --disturbed 40/20@8 --seconds 2"


@pytest.mark.e2e
@pytest.mark.long
def test_two_systems_through_a_kill(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "duel.json"), "--server", "millrace-pair", "millrace-unified"]
    options = ["--faults", "kill-prefill", "leave", "--slo", "ttft=60", "--aiperf", "false"]
    record = duel.run(duel.parsed([*SMALL.split(), *options, *out]), tmp_path)
    written = json.loads((tmp_path / "duel.json").read_text())["results"]
    assert written == json.loads(record.to_json())["results"] and written["failed"] == []
    assert all(row["completed"] == row["requests"] > 0 for row in written["rows"])
    assert all("exit code 1" in row["why"] for row in written["aiperf"]) and len(written["aiperf"]) == 2
    assert [(row["kind"], row["differ"]) for row in written["noise"]] == [("greedy", 0), ("seeded", 0)] * 2
    assert all(row["answers"] > 0 for row in written["noise"]) and written["noise"][0]["told"]
    found = [(row["victim"], row["wrong"], row["differ"], row["hung"], row["lost"]) for row in written["faults"]]
    assert found == [("prefill-0", 0, 0, 0, 0), ("", 0, 0, 0, 0), ("unified-0", 0, 0, 0, 0), ("", 0, 0, 0, 0)]


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.skipif(not AIPERF.exists(), reason="aiperf is not installed (make peers)")
def test_aiperf_counts_what_we_count(tmp_path: Path) -> None:
    options = "--server millrace-pair --widths tiny --layers 1 --loads 40/20@3 40/8x2@3 --seconds 3 --slo ttft=60"
    out = ["--aiperf", str(AIPERF), "--out", str(tmp_path / "duel.json")]
    results = duel.run(duel.parsed([*options.split(), *out]), tmp_path).results
    for row in results["aiperf"]:
        talks, ours = "turns" in row["load"], row["ours"]
        same = ("requests", "completed", "output_tokens", *(() if talks else ("prompt_tokens",)))
        assert {name: row[name] for name in same} == {name: ours[name] for name in same} and not row["errors"]
        assert not talks or row["prompt_tokens"] > ours["prompt_tokens"], "with the words of the chat template"
        assert row["goodput"] == row["request_throughput"] > 0
        assert all(0 < row[name]["p50"] <= row[name]["p99"] for name in aiperf.TIMES)
    assert len(results["aiperf"]) == 2
