"""Runs commands one after the other, each with a time limit, a log and its JSON, whatever became of those before.

OUT/NAME.log    what it printed, and what happened to it
OUT/NAME.json   its last JSON line, if it printed any
OUT/logs/NAME/  logs of the router and the workers that it started
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from millrace_cli.cluster import LOG_DIR
from millrace_load.options import CommandLine, folder
from millrace_load.record import Record, busiest_gpus, print_record
from millrace_serve.worker import caches
from millrace_serve.worker.config import WorkerConfig
from rich import box
from rich.console import Console
from rich.table import Table

from millrace_bench.data import read_data
from millrace_bench.figures import said

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "kernels", "services", "router", "bench")  # so that nothing needs to be installed
PYTEST = "pytest -p no:cacheprovider --tb=short"
WIDTH = 150
SHOWN_LINES = 12  # of the log of a stage that failed
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    command: str  # a module that Python runs, and its arguments
    limit_s: float
    target: str = ""
    figures: str = ""  # macro of bench/figures/stages.jinja for its JSON; none: the last line that it printed
    tiny: str = ""  # command over small shapes on a CPU; none: it needs GPUs


def read_stages(name: str, **values: Any) -> list[Stage]:
    """Of a file of bench/data; the values are those of a template."""
    return [Stage(**one) for one in read_data(name, **values)]


def small_stages(stages: Sequence[Stage]) -> list[Stage]:
    """The same over small shapes on a CPU."""
    return [replace(stage, command=stage.tiny, target="runs") for stage in stages if stage.tiny]


@dataclass(frozen=True, slots=True)
class Outcome:
    stage: str
    seconds: float
    passed: bool
    result: str
    target: str
    record: Json | None = None


def run(stages: Sequence[Stage], out: Path, seconds: float, console: Console) -> list[Outcome]:
    """`seconds`: for all; what begins late gets what is left, and what would begin after them is left out."""
    out.mkdir(parents=True, exist_ok=True)
    until, outcomes = time.monotonic() + seconds, []
    for stage in stages:
        left = until - time.monotonic()
        if left <= 0:
            outcomes.append(Outcome(stage.name, 0.0, False, "no time was left", stage.target))
            continue
        console.print(f"{stage.name}: at most {min(stage.limit_s, left):.0f} s", style="bold")
        outcomes.append(outcome := run_one(stage, out, min(stage.limit_s, left)))
        console.print(f"  {'ok' if outcome.passed else 'FAILED'} after {outcome.seconds:.0f} s: {outcome.result}")
        if not outcome.passed:
            console.print(_ends(out, stage.name), style="dim", markup=False)
    return outcomes


def run_one(stage: Stage, out: Path, limit_s: float) -> Outcome:
    log = out / f"{stage.name}.log"
    command = [sys.executable, "-m", *shlex.split(stage.command)]
    started = time.monotonic()
    with log.open("w") as file, busiest_gpus() as gpus:
        code = _call(command, file.fileno(), environment(out / "logs" / stage.name), limit_s)
    seconds = time.monotonic() - started
    record, last = read(log.read_text(errors="replace"))
    if record is not None:
        if gpus:  # under load; the bench itself reads them when it has ended
            record["gpus"] = gpus
        (out / f"{stage.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    passed = code == 0 and not (record or {}).get("results", {}).get("errors")  # of requests
    result = last if record is None or not stage.figures else _figures(stage.figures, record)
    if code != 0:
        result = f"{f'stopped at its limit of {limit_s:.0f} s' if code is None else f'exit code {code}'}; {result}"
    return Outcome(stage.name, seconds, passed, result, stage.target, record)


def environment(logs: Path) -> dict[str, str]:
    """Every process finds our sources, and all of them share one cache of compiled code: that of a worker."""
    cache = WorkerConfig.model_fields["cache_dir"].default
    path = os.pathsep.join([*(str(ROOT / name) for name in SOURCES), os.environ.get("PYTHONPATH", "")])
    own = {LOG_DIR: str(logs.absolute()), "PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **caches.variables(cache), **own}


def _call(command: list[str], output: int, env: dict[str, str], limit_s: float) -> int | None:
    """The exit code; None: it was ended, with all that it had started in its process group."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(text: str) -> tuple[Json | None, str]:
    """The last JSON object on a line of its own, and the last line that is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    record = next(_objects(reversed(lines)), None)
    return record, next((line for line in reversed(lines) if not line.startswith("{")), "")


def _objects(lines: Iterator[str]) -> Iterator[Json]:
    for line in lines:
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def _figures(stage: str, record: Json) -> str:
    try:
        return said(stage, record["results"])
    except (KeyError, TypeError, ValueError, jinja2.UndefinedError) as error:  # a stage that ended too early
        return f"its JSON lacks {type(error).__name__}: {error}"


def _ends(out: Path, name: str) -> str:
    """Of the stage's log, and of those of the cluster that it started last: it may have been ended while that began."""
    clusters = sorted((out / "logs" / name).glob("*"), key=lambda folder: folder.stat().st_mtime)
    logs = [out / f"{name}.log", *(log for folder in clusters[-1:] for log in sorted(folder.glob("*.log")))]
    return "\n".join(f"  the end of {log}:\n{_tail(log)}" for log in logs)


def _tail(log: Path) -> str:
    return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


def table(outcomes: Sequence[Outcome]) -> Table:
    found = Table("stage", box=box.SIMPLE, pad_edge=False)
    found.add_column("seconds", justify="right")
    for name in ("", "result", "target"):
        found.add_column(name)
    for one in outcomes:
        found.add_row(one.stage, f"{one.seconds:.0f}", "ok" if one.passed else "FAILED", one.result, one.target)
    return found


def results(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Without the stages' own records, which have files of their own."""
    return [{key: value for key, value in asdict(one).items() if key != "record"} for one in outcomes]


def command_line(name: str, description: str | None) -> CommandLine:
    """Options of every bench that consists of stages."""
    parser = CommandLine(f"millrace bench {name}", description)
    parser.add_argument("--out", type=folder, default=Path(name), metavar="DIR", help="folder of results (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these stages, in the usual order")
    parser.add_argument("--seconds", type=float, default=3 * 3600.0, help="seconds for all stages together")
    parser.add_argument("--list", action="store_true", help="print the stages with their limits and commands")
    return parser


def carry_out(name: str, stages: Sequence[Stage], parser: CommandLine, args: argparse.Namespace) -> None:
    """What `args` asks for of the stages. Exits with 1 when one failed or had no time."""
    if unknown := set(args.only) - {stage.name for stage in stages}:
        parser.error(f"--only {' '.join(sorted(unknown))}: choose from {' '.join(stage.name for stage in stages)}")
    stages = [stage for stage in stages if not args.only or stage.name in args.only]
    if args.list:
        for stage in stages:
            print(f"{stage.name:18}{stage.limit_s:5.0f} s  python -m {stage.command}")
        return
    console = Console(stderr=True, highlight=False, width=WIDTH)
    outcomes = run(stages, args.out, args.seconds, console)
    console.print(table(outcomes))
    record = Record(name, vars(args), {"stages": results(outcomes)})
    (args.out / f"{name}.json").write_text(record.to_json() + "\n")
    print_record(record)
    sys.exit(int(not all(outcome.passed for outcome in outcomes)))
