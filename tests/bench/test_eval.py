"""The evaluation's arithmetic, its command line, and its systems without processes."""

import asyncio
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from millrace_bench.data import TEXTS
from millrace_bench.eval import __main__ as command
from millrace_bench.eval import in_process, matrix, perplexity
from millrace_bench.eval.backend import Answer, Job, Perplexity
from millrace_bench.eval.remote import HttpBackend
from millrace_bench.eval.run import Suite, evaluate, measure
from millrace_bench.eval.score import Comparison, Evaluation, standard_error
from millrace_bench.eval.system import Kind, System
from millrace_cli.errors import CommandError
from millrace_common.config import load as load_config
from millrace_kernels import backend, linear
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import fp8_linear
from millrace_serve.model.attn_step import FormThresholds
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.paths import TINY
from rich.console import Console

SUITE = Suite(tasks=("addition", "sort"), num_items=10)


class Fake:
    """Knows every answer but those of the jobs numbered in `wrong` and `failing`."""

    def __init__(self, wrong: Sequence[int] = (), failing: Sequence[int] = (), cached: int = 0) -> None:
        self.wrong, self.failing, self.cached = wrong, failing, cached
        self.asked: list[str] = []

    async def answer(self, jobs: Sequence[Job], done: Callable[[], None]) -> list[Answer]:
        for job in jobs:
            self.asked.append(job.item.key)
            done()
        return [self._one(index, job) for index, job in enumerate(jobs)]

    def _one(self, index: int, job: Job) -> Answer:
        if index in self.failing:
            return Answer(error="KV_EXPIRED: gone")
        text = "7 apples" if index in self.wrong else job.item.answer
        return Answer(text, tuple(text.encode()), prompt_tokens=20, cached_tokens=self.cached, output_tokens=4)

    async def perplexity(self) -> Perplexity | None:
        return None


def quiet() -> Console:
    return Console(file=io.StringIO(), width=140)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def evaluated(backend: Fake, suite: Suite = SUITE) -> Evaluation:
    return asyncio.run(measure("fake", backend, suite.jobs(), quiet()))


# ---- figures


def test_counts_of_an_evaluation() -> None:
    figures = evaluated(Fake(wrong=(2,), failing=(5, 6))).as_dict()
    addition = figures["tasks"]["addition"]
    assert (addition["items"], addition["correct"], addition["failed"], addition["invalid"]) == (10, 7, 2, 0)
    assert addition["low"] < addition["accuracy"] == 0.7 < addition["high"]
    assert figures["all"]["items"] == 20 and figures["all"]["output_tokens"] == 4 * 16
    assert figures["failures"] == {"KV_EXPIRED: gone": 4}
    assert [one["item"] for one in figures["wrong"]] == ["addition[2]", "sort[2]"]
    assert figures["perplexity"] is None
    json.dumps(figures, allow_nan=False)


def test_no_number_is_invalid_and_not_failed() -> None:
    class Silent(Fake):
        def _one(self, index: int, job: Job) -> Answer:
            return Answer("no idea", (1, 2), output_tokens=2)

    addition, sort = evaluated(Silent()).tasks
    assert addition.as_dict()["invalid"] == 10 and sort.as_dict()["invalid"] == 0
    assert addition.correct == sort.correct == 0


@pytest.mark.parametrize(
    ("a", "b", "items", "agree"),
    [
        (100, 100, 100, True),
        (0, 0, 100, True),
        (100, 99, 100, True),  # the standard error of two perfect systems is not 0
        (100, 97, 100, False),
        (50, 55, 100, True),  # 0.05 of 0.070
        (50, 58, 100, False),
        (1, 0, 1, False),
    ],
)
def test_agreement_is_one_standard_error(a: int, b: int, items: int, agree: bool) -> None:
    assert (abs(a - b) / items <= standard_error(a, b, items)) is agree
    assert standard_error(a, b, items) == standard_error(b, a, items)


def test_answers_are_compared_by_tokens_where_both_know_them() -> None:
    a, b = Answer("1", (5,)), Answer("1", (6,))
    assert not a.same_as(b)
    assert a.same_as(Answer("1")) and Answer("1").same_as(b)
    assert not Answer("1").same_as(Answer("2"))
    assert not Answer(error="x").same_as(Answer(error="x"))


def test_comparison_lists_the_differing_items() -> None:
    comparison = Comparison.of(evaluated(Fake()), evaluated(Fake(wrong=(3,))))
    assert [one.item for one in comparison.differences] == ["addition[3]", "sort[3]"]
    assert [(line.name, line.same, line.items) for line in comparison.lines] == [
        ("addition", 9, 10),
        ("sort", 9, 10),
        ("all", 18, 20),
    ]
    assert [line.agree for line in comparison.lines] == [True, True, False]  # one of 10, but two of 20
    assert not comparison.agree and not comparison.identical
    assert Comparison.of(evaluated(Fake()), evaluated(Fake())).identical
    first = comparison.as_dict()["differences"][0]
    assert first["b"] == {"text": "7 apples", "verdict": "wrong"} and first["a"]["verdict"] == "correct"


# ---- items


def test_jobs_are_the_same_for_everybody_and_each_has_its_own_noise() -> None:
    jobs = SUITE.jobs()["addition"]
    assert [job.item for job in jobs] == [job.item for job in replace(SUITE, num_items=20, seed=9).jobs()["addition"]][
        :10
    ]
    assert len({job.seed for job in jobs}) == 10
    assert jobs[0].temperature == 0.0 and replace(SUITE, temperature=0.5).jobs()["sort"][0].temperature == 0.5


def test_items_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "copy.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n}", "answer": f"so #### {n}"}) for n in range(9)))
    jobs = Suite(tasks=("copy",), num_items=3, jsonl=path, shots=2, max_tokens=77).jobs()
    assert list(jobs) == ["copy", "copy.jsonl"]
    assert [job.item.answer for job in jobs["copy.jsonl"]] == ["2", "3", "4"]
    assert jobs["copy.jsonl"][0].item.max_tokens == 77 and len(jobs["copy.jsonl"][0].item.messages) == 5


# ---- systems


@pytest.mark.parametrize("text", ["somewhere", "pair:/nowhere", "transformers:", "127.0.0.1", "http://"])
def test_no_form_of_a_system(text: str) -> None:
    with pytest.raises(CommandError) as error:
        System.parse(text)
    assert error.value.code == 2


def http(reply: Callable[[httpx.Request], httpx.Response]) -> HttpBackend:
    client = httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(reply))
    return HttpBackend(client, concurrency=2)


def openai_reply(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "m"}]})
    body = json.loads(request.content)
    if body["seed"] == 1:
        return httpx.Response(429, text="busy")
    if body["seed"] == 2:
        return httpx.Response(200, text="not JSON")
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 8)
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return httpx.Response(200, json={"choices": [{"message": {"content": "579"}}], "usage": usage})


async def test_http_failures_are_answers() -> None:
    jobs = replace(SUITE, num_items=3).jobs()["addition"]
    good, busy, broken = await http(openai_reply).answer(jobs, lambda: None)
    assert good == Answer("579", (), 11, 0, 3)
    assert busy.error == "HTTP 429: busy"
    assert "JSONDecodeError" in broken.error


async def test_http_without_a_server() -> None:
    with pytest.raises(CommandError, match="no OpenAI server answers"):
        await http(lambda request: httpx.Response(404)).answer(SUITE.jobs()["sort"], lambda: None)


# ---- in process


def run_here(system: System, suite: Suite, concurrency: int = 3) -> Evaluation:
    return asyncio.run(evaluate(system, suite.jobs(), concurrency, quiet()))


@pytest.mark.long
def test_our_engine_answers_as_transformers() -> None:
    suite = Suite(tasks=("addition", "chat", "sort"), num_items=5)
    ours = run_here(System(Kind.MODEL, str(TINY)), suite)
    theirs = run_here(System(Kind.TRANSFORMERS, str(TINY)), suite)
    comparison = Comparison.of(ours, theirs)
    assert comparison.identical, comparison.differences
    assert ours.whole.accuracy > 0.9 and not ours.failures
    assert [t.tokens(lambda answer: answer.prompt_tokens) for t in ours.tasks] == [
        t.tokens(lambda answer: answer.prompt_tokens) for t in theirs.tasks
    ]
    assert ours.perplexity is not None and theirs.perplexity is not None
    assert ours.perplexity.tokens == theirs.perplexity.tokens
    assert ours.perplexity.value == pytest.approx(theirs.perplexity.value, rel=1e-4)


@pytest.mark.long
def test_sampling_is_repeatable_and_a_prompt_too_long_fails_alone(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    questions = ["Add 1 and 2.", "word " * 5000]
    path.write_text("\n".join(json.dumps({"question": q, "answer": "#### 3"}) for q in questions))
    suite = Suite(tasks=("chat",), num_items=4, jsonl=path, shots=0, max_tokens=8, temperature=5.0, seed=5)
    system = System(Kind.MODEL, str(TINY))
    first, second, other = (run_here(system, s) for s in (suite, suite, replace(suite, seed=6)))
    (message,) = first.failures
    assert "max_model_len=4096" in message and first.whole.count(None) == 1
    chats = [[one.answer for one in found.tasks[0].judged] for found in (first, second, other)]
    assert chats[0] == chats[1] != chats[2]


@pytest.mark.parametrize("keep_quantised", [None, True])
async def test_a_cpu_multiplies_fp8_weights_when_told_to(
    keep_quantised: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = Mock(wraps=fp8_linear)
    export(TINY, tmp_path / "fp8")
    monkeypatch.setattr(linear, "fp8_linear", products)
    monkeypatch.setattr(in_process, "TEXTS", TEXTS[:1])
    async with System(Kind.MODEL, str(tmp_path / "fp8"), keep_quantised=keep_quantised).open(1) as backend:
        products.reset_mock()  # of the rank's first step
        (answer,) = await backend.answer(replace(SUITE, num_items=1).jobs()["sort"], lambda: None)
        rows = {call.args[0].data.shape[0] for call in products.call_args_list}
        assert answer.prompt_tokens > SMALL_TOKENS and rows == ({answer.prompt_tokens} if keep_quantised else set())
        products.reset_mock()
        assert await backend.perplexity() is not None and products.called is bool(keep_quantised)


def test_logits_over_a_pool_of_another_precision() -> None:
    """In chunks that read the pool: the same with the same precision, a little off with FP8."""
    ids = list(range(100))
    whole, same, coarse = (
        perplexity.checkpoint_logits(TINY, "cpu", torch.float32, kv_dtype=dtype)(ids)
        for dtype in (None, torch.float32, torch.float8_e4m3fn)
    )
    errors = [float((found - whole).norm() / whole.norm()) for found in (same, coarse)]
    assert errors[0] < 1e-4 < errors[1] < 0.2


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "chat", "--num-items", "100000"], "chat: count=100000 exceeds"),
        (["--jsonl", "/nowhere"], "--jsonl /nowhere: No such file"),
        (["--model", "/nowhere"], "/nowhere: not a checkpoint folder"),
        (["--self-serve", "pair", "--checkpoint", "/nowhere"], "/nowhere: not a checkpoint folder"),
        (["--http", "somewhere"], "somewhere: not a URL"),
        (["--compare", "somewhere", "127.0.0.1:1"], "somewhere: not of the form HOST:PORT"),
        (["--worker-set", "tp=2"], "--worker-set: no worker is started here"),
        (["matrix", "--checkpoint", "/nowhere"], "/nowhere: not a checkpoint folder"),
    ],
)
def test_bad_usage_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError) as error:
        command.main(arguments)
    assert error.value.code == 2 and message in str(error.value)


def test_the_command_prints_tables_and_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(TINY), "--tasks", "addition", "copy", "--num-items", "3"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["bench"] == "eval" and record["config"]["num_items"] == 3
    assert record["results"]["all"]["accuracy"] == 1.0
    assert 5 < record["results"]["perplexity"]["value"] < 50
    assert "95 % interval" in err and "perplexity" in err


@contextlib.contextmanager
def systems(monkeypatch: pytest.MonkeyPatch, **fakes: Fake) -> Any:
    """Systems by kind become fakes."""

    @contextlib.asynccontextmanager
    async def opened(self: System, concurrency: int) -> AsyncIterator[Fake]:
        yield fakes[self.kind]

    monkeypatch.setattr(System, "open", opened)
    yield


@pytest.mark.parametrize(
    ("other", "code"), [(Fake(), 0), (Fake(wrong=(1,)), 0), (Fake(wrong=range(9)), 1), (Fake(failing=(0,)), 1)]
)
def test_exit_code_of_a_comparison(
    other: Fake, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--compare", "127.0.0.1:1", "http://b", "--tasks", "addition", "--num-items", "10"]
    with systems(monkeypatch, grpc=Fake(), http=other):
        assert command.main(arguments) == code
    out, err = capsys.readouterr()
    comparison = json.loads(out)["results"]["comparison"]
    assert comparison["a"] == "127.0.0.1:1" and comparison["identical"] == (other.wrong == other.failing == ())
    assert "A = 127.0.0.1:1" in err


def test_an_address_needs_no_torch_and_without_a_server_there_is_one_line() -> None:
    run = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('millrace_bench.eval', run_name='__main__')"
    command = [sys.executable, "-c", run, "--address", "127.0.0.1:9", "--num-items", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == "millrace eval: no server answers at 127.0.0.1:9; start one with `millrace serve-local`\n"


# ---- the matrix


def test_rows_of_the_matrix() -> None:
    """Everything that has a switch, and runs on a CPU, is a row."""
    found = {row.name: row for row in matrix.rows(str(TINY), 256, "cpu")}
    inexact = {"P → D FP8", "CPU FP8", "CPU INT8", "CPU INT8-BLOCK", "engine FP8 KV pool"}
    assert {name for name, row in found.items() if not row.exact} == inexact
    assert {name for name, row in found.items() if row.cached} == {"P → D cached prefixes", "unified host tier"}
    assert {row.weights for row in found.values()} == {"", "fp8", "int8", "int8-block"}
    for row in found.values():
        load_config(WorkerConfig, overrides=("role=unified", f"model={TINY}", *row.system.worker_set))


def test_kernels_of_rows_are_those_of_the_table() -> None:
    found = [kernel for row in matrix.rows(str(TINY), 256, "cuda") for kernel in row.system.kernels]
    assert len(found) == 7
    for op, target in found:
        assert not target or target in [choice.target for choice in backend.TABLE[op]]


async def test_a_row_in_this_process_has_its_form_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def absorbs(self: FormThresholds, q_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
        seen.append(plain(self, q_lens, seq_lens))
        return seen[-1]

    plain = FormThresholds.absorbs
    monkeypatch.setattr(FormThresholds, "absorbs", absorbs)
    op = ("mla_prefill.plan", "")
    job = replace(SUITE, num_items=1).jobs()["sort"]
    answers = []
    for form, expected in (("absorbed", True), ("expanded", False)):
        seen.clear()
        system = System(Kind.MODEL, str(TINY), worker_set=("limits.max_prefill_tokens=16",), form=form, kernels=(op,))
        async with system.open(1) as one:
            assert dict((op,)) == backend._forced
            answers += await one.answer(job, lambda: None)
        assert (True in seen) == expected and not backend._forced
    assert answers[0] == answers[1]


async def test_warmed_jobs_are_asked_twice_and_counted_once() -> None:
    fake, jobs = Fake(), SUITE.jobs()
    evaluation = await measure("fake", fake, jobs, quiet(), warm=4)
    keys = [job.item.key for job in jobs["addition"]]
    assert fake.asked[:20] == keys[:4] * 2 + keys[4:8] * 2 + keys[8:] * 2
    assert [task.items for task in evaluation.tasks] == [10, 10] and evaluation.whole.accuracy == 1.0


@pytest.mark.parametrize(
    ("fakes", "failing"),
    [
        ({"pair": Fake(cached=64)}, []),
        ({"pair": Fake()}, ["prompts came from the cache"]),
        ({"pair": Fake(cached=64), "unified": Fake(wrong=(1,))}, ["answers identical"]),
        (
            {"pair": Fake(cached=64), "unified": Fake(failing=range(8))},
            ["no request failed", "no accuracy more than one standard error lower", "answers identical"],
        ),
    ],
    ids=["all good", "nothing cached", "one wrong", "failures"],
)
def test_checks_of_the_matrix(
    fakes: dict[str, Fake], failing: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = {"transformers": Fake(), "unified": Fake(), "model": Fake(), **fakes}
    with systems(monkeypatch, **everything):
        arguments = ["--checkpoint", str(TINY), "--tasks", "addition", "--num-items", "10"]
        code = matrix.main([*arguments, "--rows", "P → D", "unified BF16"])
    record = json.loads(capsys.readouterr().out)
    assert [check["what"] for check in record["results"]["checks"] if not check["passed"]] == failing
    assert code == int(bool(failing))
    assert [row["system"] for row in record["results"]["rows"]][2:4] == ["P → D BF16", "P → D FP8"]


LOSSY = Fake(wrong=(1, 2, 3))
LOWER = "no accuracy more than one standard error lower"


@pytest.mark.parametrize(
    ("fakes", "failing"),
    [
        ({"CPU FP8": LOSSY, "engine FP8": LOSSY, "P → D FP8": LOSSY}, []),
        ({"CPU FP8": LOSSY}, []),
        ({"engine BF16": LOSSY, "P → D FP8": LOSSY}, [("engine BF16", LOWER), ("P → D FP8", LOWER)]),
        ({"CPU FP8": Fake(failing=(1,))}, [("CPU FP8", "no request failed")]),
    ],
    ids=["what FP8 costs", "better than the reference", "losses of the GPU", "failure"],
)
def test_checks_of_the_matrix_on_a_gpu(
    fakes: dict[str, Fake],
    failing: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """FP8 rows against FP8 on the CPU, the others against FP32."""

    async def measured(name: str, backend: Fake, *how: Any) -> Evaluation:
        return await measure(name, fakes.get(name, backend), *how)

    monkeypatch.setattr(matrix, "measure", measured)
    with systems(monkeypatch, model=Fake(), pair=Fake()):
        arguments = ["--checkpoint", str(TINY), "--tasks", "addition", "--num-items", "10", "--device", "cuda"]
        code = matrix.main([*arguments, "--rows", "CPU FP8", "engine BF16", "engine FP8", "P → D"])
    out, err = capsys.readouterr()
    results = json.loads(out)["results"]
    assert [(one["row"], one["what"]) for one in results["checks"] if not one["passed"]] == failing
    assert code == int(bool(failing))
    cost, *others = results["against_reference"]
    assert (cost["a"], cost["b"], cost["identical"]) == ("CPU FP32", "CPU FP8", "CPU FP8" not in fakes)
    assert [(one["a"], one["b"]) for one in others] == [
        ("CPU FP32", "engine BF16"), ("CPU FP8", "engine FP8"), ("CPU FP32", "P → D BF16"), ("CPU FP8", "P → D FP8"),
        ("CPU FP32", "P → D BF16 with drafts"), ("CPU FP32", "engine FP8 KV pool"),
    ]  # fmt: skip
    assert "/10 CPU FP8" in err and "/10 CPU FP32" not in err
