"""The options of `millrace bench serving`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from millrace_cli.cluster import TINY

from millrace_load.options import CommandLine, add_options, checkpoint, file, number, reader
from millrace_load.plots import check as check_picture
from millrace_load.report import Slo
from millrace_load.workload import Distribution, SharedPrefix

PARSERS = Distribution.lengths, Distribution.times, SharedPrefix.parse, Slo.parse, check_picture
LENGTHS, TIMES, PREFIX, SLO, PICTURE = (reader(parse, keep=True) for parse in PARSERS)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run depends on; each field is a command-line option."""

    api: Annotated[Literal["grpc", "http"], "API of the router"] = "grpc"
    address: Annotated[str, "host:port for grpc, URL for http; empty: where serve-local listens"] = ""
    self_serve: Annotated[bool, "start a system for this run"] = False
    prefill: Annotated[int, "with --self-serve: prefill workers"] = 1
    decode: Annotated[int, "with --self-serve: decode workers"] = 1
    unified: Annotated[bool, "with --self-serve: one unified worker instead"] = False
    engine: Annotated[Literal["model", "sim"], "with --self-serve: engine of the workers"] = "model"
    model: Annotated[Path, "with --self-serve: checkpoint folder", checkpoint] = TINY
    worker_set: Annotated[tuple[str, ...], "with --self-serve: setting of every worker"] = ()
    num_requests: Annotated[int, "counted requests; with --multi-turn: conversations; of a trace: the first"] = 100
    warmup: Annotated[int, "uncounted random requests before the run", number(int)] = 8
    request_rate: Annotated[float, "open loop: mean arrivals per second; 0: closed loop"] = 0.0
    concurrency: Annotated[int, "closed loop: clients, each with one conversation at a time"] = 16
    max_concurrency: Annotated[int, "open loop: most conversations at a time; 0: no limit"] = 0
    batches: Annotated[tuple[int, ...], "send batches of these sizes instead, each --rounds times"] = ()
    rounds: Annotated[int, "rounds of --batches"] = 3
    input_len: Annotated[str, "new tokens of a prompt: N, LOW:HIGH or lognormal:MEDIAN:SIGMA", LENGTHS] = "128"
    output_len: Annotated[str, "output tokens, as --input-len", LENGTHS] = "32"
    shared_prefix: Annotated[
        str, "FRACTION:LENGTH: that many conversations begin with the same tokens, before --input-len", PREFIX
    ] = "0:0"
    multi_turn: Annotated[int, "turns of a conversation; of a recorded one: at most"] = 1
    think_time: Annotated[str, "seconds between an answer and the next turn, as --input-len", TIMES] = "0"
    trace: Annotated[str, "file to replay: JSON lines as Mooncake's, with sessions or not, or dag_jsonl", file] = ""
    speed: Annotated[float, "with --trace: this many times faster than recorded"] = 1.0
    sharegpt: Annotated[str, "send the texts of this file; output lengths are those of its answers", file] = ""
    text: Annotated[bool, "send text instead of token ids (http: always)"] = False
    temperature: Annotated[float, "sampling temperature; 0: greedy"] = 0.0
    ignore_eos: Annotated[bool, "always generate the whole output length"] = False
    seed: Annotated[int, "seed of prompts, lengths and arrivals"] = 0
    gpus: Annotated[int, "GPUs that serve; gives the tokens of each; 0: unknown"] = 0
    slo: Annotated[str, "limits of goodput in seconds, for example ttft=0.5,tpot=0.05", SLO] = ""
    plot: Annotated[str, "write a picture of the figures to this file (.svg or .png)", PICTURE] = ""

    def __post_init__(self) -> None:
        """ValueError for what cannot be run."""
        if self.max_concurrency and not (self.request_rate or self.trace):
            raise ValueError("max_concurrency needs an open loop: request_rate or trace")
        if self.batches and (self.request_rate or self.trace or self.sharegpt or self.multi_turn > 1 or self.plot):
            raise ValueError("batches: no request_rate, trace, sharegpt, multi_turn or plot")
        if self.trace and (self.sharegpt or self.multi_turn > 1):
            raise ValueError("trace: it has its own turns: no sharegpt, multi_turn")


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = CommandLine("millrace bench serving")
    add_options(parser, Settings, {"trace": ["--mooncake"]})  # the former name until the next release
    if any(text.startswith("--mooncake") for text in (sys.argv if argv is None else argv)):
        print("--mooncake is now --trace", file=sys.stderr)
    try:
        return Settings(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
