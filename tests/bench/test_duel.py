"""The duel of servers: what it concludes, the adapters of servers, and the shapes that SGLang answers with."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from millrace_bench.duel import __main__ as duel
from millrace_bench.duel import millrace, sglang
from millrace_bench.duel.faults import TIMETABLE, timetable
from millrace_bench.duel.judge import HUNG, Compared, Key, compare, conclude, error_free_s, wrong
from millrace_bench.duel.load import Clients, write_model
from millrace_bench.duel.parts import Layout
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
    ("control", "run", "found"),
    [
        (CONTROL, sample("abcd"), (1, 0)),
        (CONTROL, sample("abce"), (1, 1)),
        (CONTROL, sample("abc"), (1, 1)),  # whole, it says
        (CONTROL, sample("abc", "CUT"), (1, 0)),  # a beginning
        (CONTROL, sample("abc\ufffd", "CUT"), (1, 0)),
        (CONTROL, sample("x", "CUT"), (1, 1)),
        (CONTROL, sample("abcdx", HUNG), (1, 1)),
        (CONTROL, sample("", "NO_WORKERS"), (0, 0)),
        (sample("ab", "CUT"), sample("abcd"), (0, 0)),  # nobody knows the right answer
    ],
)
def test_an_answer_beside_its_control(control: Sample, run: Sample, found: tuple[int, int]) -> None:
    assert compare({(0, 0): control}, {(0, 0): run}) == Compared(*found)


def test_only_requests_of_the_kind_and_of_both_runs_are_compared() -> None:
    control: dict[Key, Sample] = {(index, 0): CONTROL for index in range(7)}
    run: dict[Key, Sample] = {(index, 0): sample("abcd" if index % 3 else "x") for index in range(1, 9)}
    assert [compare(control, run, kind, 3) for kind in range(3)] == [Compared(2, 2), Compared(2, 0), Compared(2, 0)]


@pytest.mark.parametrize(
    ("noise", "found", "count"),
    [
        ((50, 0), (60, 0), 0),
        ((50, 0), (60, 3), 3),  # a server that always says the same is given nothing
        ((0, 0), (60, 2), 2),
        ((100, 50), (100, 50), 0),
        ((100, 50), (100, 60), 0),  # two standard deviations
        ((100, 50), (100, 61), 1),
        ((100, 10), (400, 90), 38),
        ((100, 100), (40, 40), 0),
    ],
)
def test_noise_explains_its_share(noise: tuple[int, int], found: tuple[int, int], count: int) -> None:
    assert wrong(Compared(*noise), Compared(*found)) == count


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
    control: dict[Key, Sample] = {(index, 0): CONTROL for index in range(4)}
    run: dict[Key, Sample] = {
        (0, 0): sample("abcx", due=11.0),
        (1, 0): sample("abcx", due=11.0),
        (2, 0): sample("ab", HUNG, due=12.0, end=20.0),
        (3, 0): sample("", "NO_WORKERS", due=13.0, end=13.0),
        (4, 0): sample("", due=13.0, end=14.0),
        (5, 0): sample("z", due=30.0, end=31.0),
    }
    row = conclude(10.0, control, run, {"greedy": Compared(9, 0), "seeded": Compared(9, 9)})
    errors = {"NO_WORKERS": 1, "EMPTY": 1}
    assert row == {"requests": 6, "differ": 2, "wrong": 1, "hung": 1, "errors": errors, "error_free_s": 10.0}


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
    names = [fault.name for fault, _ in found]
    assert names == [name for name in ALL if name in names] and "leave" in names


@pytest.mark.parametrize("server", duel.SERVERS)
def test_parts_listen_on_ports_of_their_own_and_runs_are_apart(server: str, tmp_path: Path) -> None:
    made = layout(server, tmp_path)
    workers = [part for part in made.parts if part.role != "router"]
    assert made.gpus == (2 if server.endswith("-dp") else len(workers))
    assert len({part.ready for part in made.parts}) == len(made.parts) and all(part.metrics for part in workers)
    assert made.apart(1) != made.apart(2)
    words = " ".join(word for part in made.parts for word in part.command)
    asked = (
        ("kv_dtype=fp8", "device=cuda") if server.startswith("millrace") else ("--watchdog-timeout 9", "--load-format")
    )
    assert all(word in words for word in (*asked, str(tmp_path / "duel"), "600"))


def test_a_pair_of_sglang_hands_over_through_the_port_that_its_gateway_is_told(tmp_path: Path) -> None:
    prefill, decode, router = layout("sglang-pair", tmp_path).parts
    for part, gpu in ((prefill, "0"), (decode, "1")):
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
    assert len(ids) == 200 and min(ids) >= 1024 and tokenizer.decode(ids) == text


BAD = [
    ("--server", "vllm-pair"), ("--loads", "4096@1"), ("--disturbed", "64/8x2@1"), ("--disturbed", "64/8@1,2"),
    ("--faults", "flood"), ("--kinds", "beam"), ("--controls", "1"), ("--seconds", "0"), ("--patience", "0"),
    ("--limit", "-1"), ("--loads", None),
]  # fmt: skip


@pytest.mark.parametrize(("option", "text"), BAD)
def test_bad_options_are_named_before_anything_starts(
    option: str, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--server", "millrace-pair"] + (["--disturbed", "64/8@1"] if text is not None else [])
    with pytest.raises(SystemExit) as caught:
        duel.parsed([*given, option, *([text] if text is not None else [])])
    assert caught.value.code == 2 and option in capsys.readouterr().err


# ------------------------------------------------------------------------------------- the shapes of SGLang

ERROR = {"object": "error", "message": "out of memory", "param": None}
USAGE = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {"id": "1", "object": "text_completion", "created": 1, "model": "duel", "choices": [choice], "usage": None}


BEGUN, LAST = [chunk(" a"), chunk(" b")], [chunk(" c", "length")]
TOTAL = {**chunk(""), "choices": [], "usage": USAGE}
ABORTED = {"error": {**ERROR, "type": "SERVICE_UNAVAILABLE", "code": 503}}
STREAMS: dict[str, list[dict[str, object]]] = {
    "whole": [*BEGUN, *LAST, TOTAL],
    "aborted": [*BEGUN, ABORTED],
    "gracefully aborted": [*BEGUN, chunk("", "abort"), TOTAL],
    "cut": BEGUN,
}
FAILURES: dict[str, Response] = {
    "refused": JSONResponse({**ERROR, "type": "BadRequest", "code": 400}, 400),
    "no worker": JSONResponse({"error": {"type": "Service Unavailable", "code": "no_available_workers"}}, 503),
    "bad gateway": PlainTextResponse("Bad Gateway", 502),
    "text": JSONResponse({"error": "busy"}, 503),
}


async def completions(request: Request) -> Response:
    """What the field `user` names."""
    body = await request.json()
    name = body["user"]
    if name in FAILURES:
        return FAILURES[name]
    assert body["cache_salt"] == "run-5" and body["temperature"] == 0.0 and body["stream"] is True

    async def events() -> AsyncIterator[str]:
        for event in STREAMS.get(name, BEGUN):
            yield f"data: {json.dumps(event)}\n\n"
        if name == "hung":
            await asyncio.Event().wait()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("whole", " a b c", ""),
        ("aborted", " a b", "SERVICE_UNAVAILABLE"),
        ("gracefully aborted", " a b", "ABORT"),
        ("cut", " a b", "CUT"),
        ("hung", " a b", HUNG),
        ("refused", "", "BADREQUEST"),
        ("no worker", "", "NO_AVAILABLE_WORKERS"),
        ("bad gateway", "", "HTTP_502"),
        ("text", "", "HTTP_503"),
    ],
)
async def test_an_answer_of_sglang(name: str, text: str, error: str, tmp_path: Path) -> None:
    server = HttpServer(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])]))
    port = server.start("127.0.0.1:0")
    found = Layout((), f"http://127.0.0.1:{port}", 1, sglang.HELD, layout("sglang-single", tmp_path).apart)
    clients = Clients(found, [], ["greedy"], 0.5 if name == "hung" else 60.0, number=5)
    clients._fields[0]["user"] = name
    one = Sample(0.0)
    await clients.send(Job(0, " x", 3, 7), one)
    await clients.close()
    await server.stop()
    whole = name == "whole"
    assert (one.text, one.error, one.answered) == (text, error, whole) and clients.seen == {(0, 0): one}
    assert not whole or (one.prompt_tokens, one.cached_tokens, one.output_tokens) == (9, 8, 3)


# ------------------------------------------------------------------------------------- small, whole

SMALL = "--engine sim --widths tiny --layers 1 --kinds greedy seeded --worker-set sim.vocab_size=2048 sim.step_s=0.01"


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.xdist_group("e2e")
def test_two_systems_through_a_kill(tmp_path: Path) -> None:
    loads = "--loads 40/4x2@4 --disturbed 40/20@8 --seconds 2 --faults kill-prefill leave --slo ttft=60"
    out = ["--out", str(tmp_path / "duel.json"), "--server", "millrace-pair", "millrace-unified"]
    record = duel.run(duel.parsed([*SMALL.split(), *loads.split(), *out]), tmp_path)
    written = json.loads((tmp_path / "duel.json").read_text())["results"]
    assert written == json.loads(record.to_json())["results"] and written["failed"] == []
    assert all(row["completed"] == row["requests"] > 0 for row in written["rows"])
    assert [(row["kind"], row["differ"]) for row in written["noise"]] == [("greedy", 0), ("seeded", 0)] * 2
    assert all(row["answers"] > 0 for row in written["noise"])
    found = [(row["victim"], row["wrong"], row["hung"], row["lost"]) for row in written["faults"]]
    assert found == [("prefill-0", 0, 0, 0), ("", 0, 0, 0), ("unified-0", 0, 0, 0), ("", 0, 0, 0)]
