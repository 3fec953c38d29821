"""The command line: every mistake is one clear line and an exit code, and nothing heavy is imported for little."""

import importlib.util
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import certifi
import pytest
import typer
import yaml
from millrace_cli import generate
from millrace_cli.__main__ import main
from millrace_cli.app import BENCHES, app
from millrace_router.http.api_keys import Keys
from millrace_testing.paths import TINY

TAKE_SETTINGS = (["check", str(TINY)], ["plan", "--model", str(TINY)], ["compile", "--model", str(TINY)], ["router"])
COMMANDS = sorted(typer.main.get_command(app).commands)


def millrace(*arguments: str, code: str = "from millrace_cli.__main__ import main; main()") -> CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CompletedProcess[str]]:
    """As `millrace`, in this process: for commands that end with their own usage."""

    def run(*arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["millrace", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        shown = capsys.readouterr()
        return CompletedProcess(arguments, stop.value.code, shown.out, shown.err)

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, here: Callable[..., CompletedProcess[str]]) -> None:
    result = here(command, "--help")
    assert result.returncode == 0
    assert "usage:" in result.stdout.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["router", "--set", "limits.mesage_bytes=1"], "did you mean limits.message_bytes?"),
        (["router"], "model: required, for example with --set model=VALUE"),
        (["prefill", "--set", "limits.num_page=1"], "millrace prefill: error: limits.num_page: unknown key; did you"),
        (["flexible", "--set", "modle=x"], "millrace flexible: error: modle: unknown key; did you mean model?"),
        (["router", "model=x"], "millrace router: error: unrecognized arguments: model=x"),
        (["router", "--set", "model=/nope"], "millrace router: model: no usable tokenizer: /nope/tokenizer.json"),
        (["generate", "x", "--address", "http://127.0.0.1:8000"], "'http://127.0.0.1:8000' is not HOST:PORT of a gRPC"),
        (["workers", "--address", "127.0.0.1:65536"], "'127.0.0.1:65536' is not HOST:PORT of a gRPC port"),
        (["generate", "x", "--temperature", "nan"], "'--temperature'"),
        (["generate", "x", "--tls-cert", "/dev/null"], "--tls-cert and --tls-key go together"),
        (
            ["batch", "/dev/null", "--out", "x", "--address", "https://a", "--tls-key", "x"],
            "--tls-cert and --tls-key go together",
        ),
        (["batch", "/dev/null", "--out", "x", "--address", "nothing"], "nothing: must be http:// or https://"),
        (["batch", "/dev/null", "--out", "x", "--address", "http://a:65536"], "a port up to 65535"),
        *(([*command, "--set", "colour=red"], "colour: unknown key") for command in TAKE_SETTINGS),
        (["router", "--config", __file__], "expected '<document start>'"),
        (["weights", "a:1", "b", "pause"], "'b' is not HOST:PORT of a gRPC port"),
        (["weights", "a:1", "stop"], "'stop' is not one of 'pause', 'load', 'resume', 'sleep', 'wake'"),
        (["keys", "nwe"], "Did you mean 'new'?"),
        (["compile"], "Missing option '--model'"),
        (["bench", "serving", "--nope"], "millrace bench serving: error: unrecognized arguments: --nope"),
        (["eval", "--nope"], "millrace eval: error: unrecognized arguments: --nope"),
        (["serve-local", "--unified", "--prefill", "1"], "--prefill: has no effect with --unified"),
        (["serve-local", "--unified", "--flexible", "0"], "--flexible: has no effect with --unified"),
        (["serve-local", "--flexible", "2", "--decode", "1"], "--decode: has no effect with --flexible"),
        (["serve-local", "--prefill", "257"], "prefill"),
        (["serve-local", "--log-dir", "/dev/null/x"], "--log-dir: /dev/null/x: Not a directory"),
        (["serve-local", "--worker-set", "foo=1"], "--worker-set: foo: unknown key"),
        (["serve-local", "--worker-set", "limits.max_running=many"], "--worker-set: limits.max_running: Input should"),
        (["serve-local", "--worker-set", "role=decode"], "--worker-set role=decode: the command sets it"),
        (["serve-local", "--router-set", "queue_size=x"], "--router-set: queue_size: Input should be"),
        (["serve-local", "--router-set", "admin_http=a:1"], "--router-set admin_http=a:1: the command sets it"),
        (["serve-local", "--model", "x" * 300], "there is no config.json"),
        (["batch", "/dev/null", "--out", "x", "--tls-ca", certifi.where()], "--tls-ca: has no effect with an http://"),
        (["workers", "--wide", "--json"], "--wide: has no effect with --json"),
        (["weights", "a:1", "pause", "--path", "x"], "--path: has no effect but on load and wake"),
        (["weights", "a:1", "load", "--path", "x", "--drop"], "--drop: has no effect but on pause"),
        (["weights", "a:1", "wake", "--version", "x"], "--version: has no effect without --path"),
        (["weights", "a:1", "resume", "--tls-name", "x"], "--tls-name: has no effect without --tls-ca or"),
        (["compile", "--model", "x", "--set", "model=y"], "--set model=y: the command sets it itself"),
        (["check", "x", "--set", "model=y"], "--set model=y: the command sets it itself"),
        (["plan", "--model", "x", "--slo", "ttft=1"], "--slo: has no effect without --workload"),
        (["plan", "--model", "x", "--workload", ""], "--workload: '' is not of the form"),
        (["plan", "--model", "x", "--workload", "1/1@1", "--goal", "latency"], "--goal: has no effect with --workload"),
        (["plan", "--model", "x", "--workload", "1/1@1", "--role", "decode"], "--role: has no effect with --workload"),
        (["plan", "--model", "x", "--gpus", "16", "--tp", "3"], "--gpus 16: must be tp 3 x dp 5"),
        (["plan", "--model", "x", "--set", "tp=2"], "--set tp=2: the command sets it itself"),
        (["prefill", "--set", "role=decode", "--set", "engine=sim"], "role: this entry point serves prefill, not"),
        (["keys", "new", "--tenant", "a b"], "--tenant: 'a b' does not match"),
        (["router", "--set", "model=2024-99-99"], "the value is not YAML: month must be in 1..12"),
        (["router", "--set", "model=" + "[" * 3000], "the value is not YAML"),
        (["bench", "servin"], "there is no bench 'servin'; did you mean 'serving'?"),
        (["serve"], "serve-local"),
        (["workers", "--wid"], "--wide"),
        (["router", "--set", "grpc=a:65536"], "grpc: must have a port of at most 65535 (got 'a:65536')"),
        (["router", "--set", f"model={TINY}", "--set", "secret=/nope"], "millrace router: secret: [Errno 2] No such"),
        (["router", "--set", f"model={TINY}", "--set", "api_keys=/nope"], "router: api_keys: [Errno 2] No such"),
        (["serve-local", "--admin-http-port", "65536"], "admin-http-port"),
        (["generate", "x", "--max-tokens", "0"], "max-tokens"),
        (["generate", "\udcff"], "UTF-8"),
        (["generate", "x", "--api-key", "ключ"], "--api-key"),
        (["batch", "/dev/null", "--out", "/nonexistent/out"], "has no requests"),
        (["batch", "/dev/null", "--out", "x", "--address", "http://[::1"], "--address http://[::1"),
        (["batch", "/dev/null", "--out", "x", "--tls-ca", "/nonexistent.pem"], "--tls-ca"),
        (["check", "x", "--gpu", "XX"], "--gpu: must be one of H100, H200, H800, H20, B200, not 'XX'"),
    ],
)
def test_bad_usage_is_exit_2_and_names_the_culprit(
    arguments: list[str], message: str, here: Callable[..., CompletedProcess[str]]
) -> None:
    result = here(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.rstrip().rpartition("rror: ")[2].count("\n") == 0


def test_standard_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, here: Callable[..., CompletedProcess[str]]
) -> None:
    """Most locales read it strictly."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    result = here("generate", "-")
    assert result.returncode == 2 and "UTF-8" in result.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["bench"], 2), (["bench", "--help"], 0)])
def test_help_of_bench_says_what_each_bench_measures(
    arguments: list[str], code: int, here: Callable[..., CompletedProcess[str]]
) -> None:
    result = here(*arguments)
    assert result.returncode == code
    assert all(f"  {name:<15} {what}\n" in result.stdout for name, what in BENCHES.items())


def test_path_through_a_file_is_one_line(here: Callable[..., CompletedProcess[str]]) -> None:
    result = here("check", "/dev/null")
    assert result.returncode == 1 and "/dev/null/config.json: not a directory" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [*([command, "--help"] for command in COMMANDS), ["--version"], ["bench"], ["keys", "new"], ["generate", "x"]],
    ids=" ".join,
)
def test_full_disk_is_one_line(
    arguments: list[str], here: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(address: str, request: object, on_text: Callable[[str], None], *access: object) -> None:
        on_text("x")

    monkeypatch.setattr(generate, "stream", stream)
    for buffer in (-1,) if "--help" in arguments else (-1, 0):  # argparse ignores that its help is not written
        with Path("/dev/full").open("wb", buffer) as full:
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
            result = here(*arguments)
        assert result.returncode == 1 and result.stderr.endswith("No space left on device\n")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "code"), [(["bench", "serving", "--help"], 0), (["bench", "router"], 1), (["eval"], 1)]
)
def test_a_bench_that_is_not_installed_says_so(
    command: list[str], code: int, here: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels and images have the load client alone."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "millrace_bench" else found(name))
    result = here(*command)
    assert result.returncode == code
    assert code == 0 or f"`millrace {' '.join(command)}` needs the source tree" in result.stderr


@pytest.mark.parametrize("command", [["generate", "hello"], ["workers"]])
def test_missing_server_is_exit_1_with_its_address(
    command: list[str], here: Callable[..., CompletedProcess[str]]
) -> None:
    result = here(*command, "--address", "127.0.0.1:1")
    assert result.returncode == 1
    assert "127.0.0.1:1" in result.stderr
    assert result.stderr.count("\n") == 1


async def test_generate_prints_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = ("a\tb\r", "\n", "x" * 200 + "  ", "[bold]ü")

    async def stream(address, request, on_text, identity, api_key):
        for piece in pieces:
            on_text(piece)
        return generate.PartialAnswer("".join(pieces))

    monkeypatch.setattr(generate, "stream", stream)
    for as_json in (False, True):
        await generate.generate("nobody:1", None, as_json, None, "")
    text, line = capsys.readouterr().out.split("\n{")
    assert text == "".join(pieces) and json.loads("{" + line)["text"] == text


def test_version(here: Callable[..., CompletedProcess[str]]) -> None:
    assert here("--version").stdout.strip().count(".") == 2


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_light_commands_import_nothing_heavy(argument: str) -> None:
    code = (
        "import sys\nfrom millrace_cli.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'starlette', 'transformers'} & set(sys.modules)))"
    )
    result = millrace(argument, code=code)
    assert result.stdout.endswith("[]\n"), result.stdout


@pytest.mark.parametrize("tenant", ["team-a", "true", "1.5", None])
def test_new_key_and_its_entry_fit(
    here: Callable[..., CompletedProcess[str]], tmp_path: Path, tenant: str | None
) -> None:
    made = []
    for _ in range(2):
        result = here("keys", "new", *(() if tenant is None else ("--tenant", tenant)))
        assert result.returncode == 0 and not result.stderr
        made.append(yaml.safe_load(result.stdout))
    keys, entries = zip(*((one["key"], one["entry"]) for one in made), strict=True)
    assert keys[0] != keys[1] and not any(key in json.dumps(entries) for key in keys) and min(map(len, keys)) >= 32
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    known = Keys(path, time.monotonic, lambda outcome: None)
    assert [known.tenant(f"Bearer {key}").name for key in keys] == [tenant or "default"] * 2
