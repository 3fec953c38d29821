"""The options of `millrace bench serving`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from millrace_cli.cluster import TINY

from millrace_load.options import add_options
from millrace_load.plots import check as check_picture
from millrace_load.report import Slo
from millrace_load.workload import Distribution, SharedPrefix


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
    model: Annotated[Path, "with --self-serve: checkpoint folder"] = TINY
    worker_set: Annotated[tuple[str, ...], "with --self-serve: setting of every worker"] = ()
    num_requests: Annotated[int, "counted requests; with --multi-turn: conversations; of a trace: the first"] = 100
    warmup: Annotated[int, "uncounted random requests before the run"] = 8
    request_rate: Annotated[float, "open loop: mean arrivals per second; 0: closed loop"] = 0.0
    concurrency: Annotated[int, "closed loop: clients, each with one conversation at a time"] = 16
    max_concurrency: Annotated[int, "open loop: most conversations at a time; 0: no limit"] = 0
    batches: Annotated[tuple[int, ...], "send batches of these sizes instead, each --rounds times"] = ()
    rounds: Annotated[int, "rounds of --batches"] = 3
    input_len: Annotated[str, "new tokens of a prompt: N, LOW:HIGH (uniform) or lognormal:MEDIAN:SIGMA"] = "128"
    output_len: Annotated[str, "output tokens, as --input-len"] = "32"
    shared_prefix: Annotated[
        str, "FRACTION:LENGTH: that many conversations begin with the same tokens, before --input-len"
    ] = "0:0"
    multi_turn: Annotated[int, "turns of a conversation; of a recorded one: at most"] = 1
    think_time: Annotated[str, "seconds between an answer and the next turn, as --input-len"] = "0"
    trace: Annotated[str, "replay this file: JSON lines of Mooncake's format, with sessions or not, or dag_jsonl"] = ""
    speed: Annotated[float, "with --trace: this many times faster than recorded"] = 1.0
    sharegpt: Annotated[str, "send the texts of this file; output lengths are those of its answers"] = ""
    text: Annotated[bool, "send text instead of token ids (http: always)"] = False
    temperature: Annotated[float, "sampling temperature; 0: greedy"] = 0.0
    ignore_eos: Annotated[bool, "always generate the whole output length"] = False
    seed: Annotated[int, "seed of prompts, lengths and arrivals"] = 0
    gpus: Annotated[int, "GPUs that serve; gives the tokens of each; 0: unknown"] = 0
    slo: Annotated[str, "limits of goodput in seconds, for example ttft=0.5,tpot=0.05"] = ""
    plot: Annotated[str, "write a picture of the figures to this file (.svg or .png)"] = ""

    def __post_init__(self) -> None:
        """ValueError for what cannot be run."""
        least = {"num_requests": 1, "concurrency": 1, "warmup": 0, "request_rate": 0, "multi_turn": 1}
        least |= {"max_concurrency": 0, "rounds": 1, "gpus": 0}
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")
        if min(self.batches, default=1) < 1:
            raise ValueError(f"batches must be at least 1, not {min(self.batches)}")
        if self.max_concurrency and not (self.request_rate or self.trace):
            raise ValueError("max_concurrency needs an open loop: request_rate or trace")
        if self.batches and (self.request_rate or self.trace or self.sharegpt or self.multi_turn > 1 or self.plot):
            raise ValueError("batches: no request_rate, trace, sharegpt, multi_turn or plot")
        if self.plot:
            check_picture(self.plot)
        for parse, text in (
            (Distribution.lengths, self.input_len),
            (Distribution.lengths, self.output_len),
            (Distribution.times, self.think_time),
            (SharedPrefix.parse, self.shared_prefix),
            (Slo.parse, self.slo),
        ):
            parse(text)
        if not self.speed > 0:
            raise ValueError(f"speed must be above 0, not {self.speed}")
        if self.trace and (self.sharegpt or self.multi_turn > 1):
            raise ValueError("trace: it has its own turns: no sharegpt, multi_turn")


def parse(argv: Sequence[str] | None = None) -> Settings:
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="millrace bench serving", formatter_class=form)
    add_options(parser, Settings, {"trace": ["--mooncake"]})  # the former name until the next release
    if any(text.startswith("--mooncake") for text in (sys.argv if argv is None else argv)):
        print("--mooncake is now --trace", file=sys.stderr)
    try:
        return Settings(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))
