"""AIPerf as a second client, which we did not write: it sends the same requests at the same moments, and measures."""

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace_cli.process import Process
from millrace_load.clients import Job
from millrace_load.record import Row
from millrace_load.report import Slo
from millrace_load.workload import Plan

from millrace_bench.duel.load import Clients
from millrace_bench.duel.parts import end, shell
from millrace_bench.pd_load import Segment

INPUT, REPORT = "input.jsonl", "profile_export_aiperf.json"
WRITES = ("prompt", "stream", "stream_options")  # fields of a request that AIPerf writes itself
COUNTS = {"completed": "request_count", "prompt_tokens": "total_isl", "output_tokens": "total_osl"}
RATES = ("goodput", "request_throughput", "output_token_throughput")
TIMES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "request_latency": "request_latency"}
START_S = 180.0  # to start and to end its processes
OPTIONS = (
    *("--streaming", "--use-server-token-count", "--custom-dataset-type", "multi_turn", "--fixed-schedule"),
    *("--export-level", "summary", "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
)
# A folder is no tokenizer for AIPerf where Hugging Face is told to be offline. It needs no network for one.
ENVIRONMENT = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "PYTHONPATH": ""}


@dataclass(frozen=True, slots=True)
class AIPerf:
    """A program that measures one server."""

    program: Path
    url: str
    model: Path  # folder with the tokenizer; its name is the model's
    folder: Path  # of inputs, reports and logs
    slo: Slo
    patience_s: float  # how long a request may take

    async def measure(self, segment: Segment, clients: Clients) -> Row:
        """The figures of what these clients would send, or `why` there are none."""
        folder = Path(tempfile.mkdtemp(prefix="aiperf-", dir=self.folder))
        rows = conversations(clients.plan(segment), clients.body)
        (folder / INPUT).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        limit_s = START_S + segment.seconds + segment.load.turns * self.patience_s
        return await report(self.command(clients.headers, folder, segment.load.turns), folder, limit_s)

    def command(self, headers: Mapping[str, str], folder: Path, turns: int) -> list[str]:
        """Conversations go to /v1/chat/completions: only there AIPerf sends earlier answers too."""
        limits = {TIMES[name]: limit for name, limit in asdict(self.slo).items() if limit is not None}
        return [
            *(str(self.program), "profile", *OPTIONS, "--endpoint-type", "chat" if turns > 1 else "completions"),
            *("--url", self.url, "--model", self.model.name, "--tokenizer", str(self.model)),
            *("--input-file", str(folder / INPUT), "--artifact-dir", str(folder)),
            *("--request-timeout-seconds", f"{self.patience_s:g}"),
            *(word for name, value in headers.items() for word in ("--header", f"{name}:{value}")),
            *(("--goodput", " ".join(f"{name}:{1e3 * limit:g}" for name, limit in limits.items())) if limits else ()),
        ]


def conversations(plan: Plan, body: Callable[[Job], Row]) -> Iterator[Row]:
    """Lines of AIPerf's input, times in milliseconds. `body`: of a request, which AIPerf extends by the prompt."""
    for one in plan.conversations:
        assert one.start_s is not None, "AIPerf replays moments"
        begin = {"timestamp": 1e3 * one.start_s}
        moments = (begin, *({"delay": 1e3 * turn.think_s} for turn in one.turns[1:]))
        turns = []
        for turn, moment in zip(one.turns, moments, strict=True):
            fields = body(Job(one.index, "", turn.max_tokens, turn.seed))
            extra = {key: value for key, value in fields.items() if key not in WRITES}
            turns.append({"text": turn.said, "extra": extra, **moment})
        yield {"turns": turns, **begin}  # without a moment of its own, the first line is refused


async def report(command: Sequence[str], folder: Path, limit_s: float) -> Row:
    """The figures of a run of AIPerf, or `why` there are none."""
    process = Process("aiperf", folder, {**os.environ, **ENVIRONMENT})
    try:
        await process.start(shell(command))
        async with asyncio.timeout(limit_s):
            code = await process.wait()
    except TimeoutError:
        return {"why": f"not done after {limit_s:.0f} s. {process.end_of_log(10)}"}
    finally:
        await end(process)
    if code:
        return {"why": f"exit code {code}. {process.end_of_log(10)}"}
    return figures(json.loads((folder / REPORT).read_text()))


def figures(found: Mapping[str, Any]) -> Row:
    """Of AIPerf's report, by our names, in seconds. What nothing was measured of is not in the report."""
    counts = {name: int(found[theirs]["avg"]) for name, theirs in COUNTS.items()}
    errors: Counter[str] = Counter()
    for kind in found["error_summary"]:
        errors[kind["error_details"]["type"]] += kind["count"]
    rates = {name: found[name]["avg"] if name in found else None for name in RATES}
    times = {
        name: {p: found[theirs][p] / 1e3 if theirs in found else None for p in ("p50", "p99")}
        for name, theirs in TIMES.items()
    }
    requests = counts["completed"] + errors.total()
    return {"version": found["aiperf_version"], "requests": requests, "errors": errors, **counts, **rates, **times}
