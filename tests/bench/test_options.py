"""No bench starts with an option that cannot be: the option is named, and every number has limits."""

import importlib
import inspect
import shlex
from dataclasses import asdict
from typing import Any

import pytest
from millrace_cli.app import BENCHES
from millrace_load import serving_options
from millrace_load.options import CommandLine
from millrace_testing.paths import ROOT

NEEDED = {"shard": "--shard tp8", "startup": "--widths tiny", "duel": "--server millrace-pair --disturbed 64/8@1"}
OTHERS = ("drafts", "duties", "eval.logits", "eval.matrix", "kernels.forms", "kernels.tune", "onoff", "overload")
BAD = {
    "pd": "--loads 4096@1, --loads 4096/256, --loads 0/4@1, --loads 4/4x0@1, --loads 4/4@0, --loads a/b@1, "
    "--loads 4/4@1.2.3, --topologies 3p, --topologies 1d, --topologies 0u, --topologies 1p+1p+1d, --topologies 3x, "
    "--topologies 4flex+1p, --topologies 1p+1d+, --topologies '', --changing 4/4@1;2, --changing 4/4, --over http, "
    "--plot goodput.pdf, --model /no, --think-time x",
    "duel": "--slo tttf=1, --slo ttft, --slo ttft=-1, --slo ttft=nan, --out /dev/null/x, --out /tmp, --worker-set dp, "
    "--loads 4096@1, --disturbed 64/8x2@1, --disturbed 64/8@1;2, --faults no, --kinds beam, --controls 1, --aiperf a",
    "serving": "--input-len 5:2, --output-len many, --shared-prefix 3, --think-time -1, --trace /none, --slo speed=1, "
    "--plot load.pdf, --api smtp, --max-concurrency 4, --batches 4 --request-rate 2, --model /nowhere, "
    "--trace setup.py --sharegpt setup.py, --mooncake setup.py --multi-turn 2",
    "gpu": "--out /dev/null", "shard": "--decode 8", "ranks": "--prefill 0x8", "replicas": "--mixed 8x8",
    "tiers": "--step 8x", "stepping": "--agreements 8", "transfer": "--ucx x, --devices cpu gpu",
    "kernels": "--device cuda:x", "engine": "--acceptance 1 2 0", "eval": "--temperature 101",
}  # fmt: skip


def parse(monkeypatch: pytest.MonkeyPatch, name: str, *given: str) -> dict[str, Any]:
    """What the bench would run with. SystemExit: it would not."""
    arguments = [*NEEDED.get(name, "").split(), *given]
    if name == "serving":
        return asdict(serving_options.parse(arguments))
    module = importlib.import_module(f"millrace_bench.{name}")
    module = importlib.import_module(f"millrace_bench.{name}.__main__") if hasattr(module, "__path__") else module
    if hasattr(module, "parsed"):
        return dict(vars(module.parsed(arguments)))
    parse_args = CommandLine.parse_args

    def parsed(parser: CommandLine, *rest: Any) -> None:
        raise InterruptedError(vars(parse_args(parser, arguments)))

    with monkeypatch.context() as patch, pytest.raises(InterruptedError) as found:
        patch.setattr(CommandLine, "parse_args", parsed)
        module.main(*[[] for _ in inspect.signature(module.main).parameters])
    return dict(found.value.args[0])


@pytest.mark.parametrize("name", [*BENCHES, "eval", "peers.router", "stepping", *OTHERS])
def test_no_bench_takes_a_number_that_cannot_be(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, default in parse(monkeypatch, name).items():
        one = default[0] if isinstance(default, list | tuple) and default else default
        if type(one) in (int, float) and option != "acceptance":
            flag = f"--{option.replace('_', '-')}"
            for bad in ("nan", "-1", "x", "inf" if type(one) is float else "0.5"):
                with pytest.raises(SystemExit) as stop:
                    parse(monkeypatch, name, f"{flag}={bad}")
                assert stop.value.code == 2 and f"argument {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "given"), [(name, one) for name, many in BAD.items() for one in many.split(", ")])
def test_what_is_wrong_is_named_before_any_work(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    option, *values = shlex.split(given.replace(";", ","))
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, name, option, *values)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and option.rpartition("-")[2] in error and "Traceback" not in error


def test_numbers_at_their_limits_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, given in (("pd", "--warmup 0 --seed 0 --seconds 1e-9"), ("serving", "--warmup 0 --request-rate 0")):
        assert parse(monkeypatch, name, *given.split())
