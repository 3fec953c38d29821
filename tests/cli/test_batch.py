"""`millrace batch` against a scripted server, and against a file that was cut off anywhere."""

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from millrace_cli import batch, batch_file
from millrace_cli.errors import CommandError
from millrace_testing.examples import examples

Handler = Callable[[httpx.Request], httpx.Response]


def request(name: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": name}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def name_of(asked: httpx.Request) -> str:
    return json.loads(asked.content)["messages"][0]["content"]


def run(file: Path, out: Path, handler: Handler, concurrency: int = 3) -> int:
    def answer(asked: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={}) if asked.url.path == "/v1/models" else handler(asked)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://router")
    return asyncio.run(batch.run(client, file, out, concurrency))


def echo(asked: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"said": name_of(asked)}, headers={"x-request-id": "r1"})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PAUSE_S", 0.0)


def test_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a{i}" for i in range(7)]
    file, out = write(tmp_path / "in", *map(request, names), ""), tmp_path / "out"
    assert run(file, out, echo) == 0
    lines = {line["custom_id"]: line for line in read(out)}
    assert sorted(lines) == names and len({line["id"] for line in lines.values()}) == 7
    for name, line in lines.items():
        assert line["response"] == {"status_code": 200, "request_id": "r1", "body": {"said": name}}
        assert line["error"] is None
    assert "7 answered" in capsys.readouterr().err


def test_what_is_answered_is_not_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path / "in", *map(request, "abc")), tmp_path / "out"
    assert run(write(tmp_path / "first", request("a")), out, echo) == 0
    whole, sent = out.read_bytes(), []
    out.write_bytes(whole + whole[: len(whole) // 2])  # torn while it was written

    def note(asked: httpx.Request) -> httpx.Response:
        sent.append(name_of(asked))
        return echo(asked)

    assert run(file, out, note) == 0
    assert sorted(sent) == ["b", "c"] and sorted(line["custom_id"] for line in read(out)) == ["a", "b", "c"]
    assert out.read_bytes().startswith(whole) and "2 answered, 1 were there" in capsys.readouterr().err
    assert run(file, out, note) == 0 and len(sent) == 2


LINES = [{"custom_id": f"a{i}", "response": {"body": "ü\n"}, "error": None} for i in range(3)]
WHOLE = "".join(json.dumps(line) + "\n" for line in LINES).encode()


@examples(25, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(WHOLE)))
def test_file_may_be_cut_off_anywhere(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "out"
    path.write_bytes(WHOLE[:size])
    ids, kept = batch_file.answered(path)
    assert ids == {f"a{i}" for i in range(WHOLE[:size].count(b"\n"))} and WHOLE[:kept].count(b"\n") == len(ids)
    assert kept <= size and (kept == 0 or WHOLE[kept - 1 : kept] == b"\n")


def test_busy_server_is_asked_again(tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", *map(request, "abc")), tmp_path / "out"
    tries: dict[str, int] = {}

    def busy(asked: httpx.Request) -> httpx.Response:
        name = name_of(asked)
        tries[name] = tries.get(name, 0) + 1
        if tries[name] == 1:
            return httpx.Response(429, headers={"retry-after": "0"}, json={})
        if tries[name] == 2:
            return httpx.Response(503, json={})
        if tries[name] == 3:
            raise httpx.ConnectError("refused")
        if tries[name] <= 5:
            return httpx.Response(502 if tries[name] == 4 else 504, html="<h1>a proxy's page</h1>")
        return echo(asked)

    assert run(file, out, busy) == 0
    assert set(tries.values()) == {6} and len(read(out)) == 3


def test_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PAUSE_S", 1.0)
    told = httpx.Response(429, headers={"retry-after": "7"})
    assert batch._pause(0, told) == 7.0 and 15 <= batch._pause(5, told) <= 30
    for odd in ("Wed, 21 Oct 2026 07:28:00 GMT", "-3", ""):
        assert 0.5 <= batch._pause(0, httpx.Response(503, headers={"retry-after": odd})) <= 1
    assert batch._pause(9, httpx.Response(503, headers={"retry-after": "3600"})) == 30.0
    assert 1 <= batch._pause(1, None) <= 2


def test_what_no_server_took_is_left_for_the_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path / "in", *map(request, "abc")), tmp_path / "out"
    assert run(file, out, lambda asked: httpx.Response(503) if name_of(asked) == "b" else echo(asked)) == 1
    assert sorted(line["custom_id"] for line in read(out)) == ["a", "c"]
    assert "1 not answered: run the command again" in capsys.readouterr().err
    assert run(file, out, echo) == 0 and len(read(out)) == 3


def test_errors_of_requests_are_answers(tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", request("a"), request("b")), tmp_path / "out"
    refusal = {"error": {"message": "temperature must be"}}
    answers = {"a": httpx.Response(400, json=refusal), "b": httpx.Response(500, text="<html>")}
    assert run(file, out, lambda asked: answers[name_of(asked)], concurrency=1) == 1
    refused, broken = read(out)
    assert refused["response"]["status_code"] == 400 and refused["response"]["body"] == refusal
    assert refused["error"] is None and broken["response"] is None
    assert broken["error"] == {"code": "not_json", "message": "status 500: <html>"}


BAD = {
    "line 1: is not JSON: Expecting ',' delimiter at character 8": '{"a": 1',
    "line 1: must be a JSON object": [1],
    "line 1: custom_id must be a text": request(""),
    "line 1: method must be POST": request("x", method="GET"),
    "line 1: url must be one of /v1/chat/completions,": request("x", url="/v1/embeddings"),
    "line 1: body must be a JSON object": request("x", body=[]),
    "line 1: body.stream must be absent": request("x", body={"stream": True}),
    "line 3: custom_id 'good' is used twice": request("good"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_lines_are_named_before_any_work(tmp_path: Path, words: str) -> None:
    lines = [request("good"), ""] if words.startswith("line 3") else []
    file, out = write(tmp_path / "in", *lines, BAD[words], request("last")), tmp_path / "out"
    with pytest.raises(CommandError) as caught:
        run(file, out, lambda asked: pytest.fail("nothing is sent"))
    assert words in str(caught.value)
    assert caught.value.code == 2 and not out.exists()


def test_only_the_first_bad_lines_are_told(tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        batch_file.requests(write(tmp_path / "in", *["{"] * 14))
    assert str(caught.value).count("line ") == 10 and str(caught.value).endswith("and 4 more")


def test_output_that_is_none_is_not_touched(tmp_path: Path) -> None:
    file, out = write(tmp_path / "in", request("a")), write(tmp_path / "out", "notes")
    with pytest.raises(CommandError, match="line 1 is not an answer"):
        run(file, out, echo)
    assert out.read_text() == "notes\n"
    with pytest.raises(CommandError, match="line 1 is not an answer"):
        run(file, file, echo)
    with batch._appended(tmp_path / "free"), pytest.raises(CommandError, match="another run writes to"):
        run(file, tmp_path / "free", echo)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/dev/full", "--out: /dev/full is not a file"),
        ("none/out", "none/out: No such file or directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_used_is_told_before_any_work(tmp_path: Path, name: str, message: str) -> None:
    good = write(tmp_path / "in", request("a"))
    for file, out in ((good, tmp_path / name), *([] if name == "/dev/full" else [(tmp_path / name, tmp_path / "out")])):
        with pytest.raises(CommandError, match=message) as caught:
            run(file, out, lambda asked: pytest.fail("nothing is sent"))
        assert caught.value.code == 2 and not (tmp_path / "out").exists()


def test_full_disk_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(batch, "_line", Mock(side_effect=full))  # beside the write
    with pytest.raises(CommandError, match="No space left"):
        run(write(tmp_path / "in", *map(request, "abcdef")), tmp_path / "out", echo)


def test_refused_key_and_a_missing_server_end_the_run(tmp_path: Path) -> None:
    file = write(tmp_path / "in", request("a"))
    for handler, words in (
        (Mock(side_effect=httpx.ConnectError("refused")), "no server answers at http://router"),
        (lambda asked: httpx.Response(401, text="who?"), "refuses the API key: who"),
    ):
        client = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://router")
        with pytest.raises(CommandError, match=words):
            asyncio.run(batch.run(client, file, tmp_path / "out", 1))
