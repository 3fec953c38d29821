"""What splits of workers into prefill and decode are expected to serve of a workload. Pure.

The times of a step come from the predictions of predict.py, and from two timed steps, with and without a chunk of a
prompt. The router's controller of duties compares splits with the same function (millrace_common/split.py).
"""

import re
import statistics

from millrace_common.split import Capacity, DutySplit, Slo, Workload, best
from millrace_common.step_times import StepTimes

from millrace_serve.plan import predict
from millrace_serve.plan.facts import chunk_seconds
from millrace_serve.plan.predict import StepRanks

FEW, MANY, SHORT, LONG = 8, 128, 1024, 4096  # sequences, tokens
BAR = 40  # characters
WORKLOAD = re.compile(r"(\d+)/(\d+)@(\d+(?:\.\d+)?)")


def workload(text: str) -> Workload:
    """ "4096/256@7.5": tokens of a prompt and of its output, requests per second. ValueError with the form."""
    found = WORKLOAD.fullmatch(text)
    if found is None or not min(*map(float, found.groups())) > 0:
        raise ValueError(f"{text!r} is not of the form INPUT/OUTPUT@RATE, all above 0, as 4096/256@7.5")
    return Workload(int(found[1]), int(found[2]), float(found[3]))


def limits(text: str) -> Slo:
    """ "ttft=1,tpot=0.04", in seconds. ValueError with the form."""
    found = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in ("ttft", "tpot") or not re.fullmatch(r"\d*\.?\d+", value) or not float(value) > 0:
            raise ValueError(f"{item!r} is none of ttft=SECONDS, tpot=SECONDS, above 0")
        found[f"{name}_s"] = float(value)
    return Slo(**found)


def times(ranks: StepRanks) -> StepTimes | None:
    """Of a replica. None: nobody has timed steps of its shape on this GPU."""
    points = ((FEW, SHORT), (MANY, SHORT), (MANY, LONG))
    decode = [predict.decode(ranks, rows, context) for rows, context in points]
    prompts = [predict.prefill(ranks, length) for length in (SHORT, LONG)]
    found = [one.ms / 1e3 for one in (*decode, *prompts) if one is not None]
    launches = [seconds * ranks.layers for seconds in chunk_seconds(ranks.shape)]
    if len(found) < len(points) + len(prompts) or not launches:
        return None
    few, many, far, short, long = found
    key_s = (far - many) / MANY / (LONG - SHORT)
    sequence_s = max((many - few) / (MANY - FEW) - key_s * SHORT, 0.0)
    fixed_s, chunk_s = few - FEW * (sequence_s + key_s * SHORT), statistics.mean(launches)
    pair_s = max((long - short) / (LONG - SHORT) * 2, 0.0)
    token_s = short - pair_s * SHORT / 2 - (fixed_s + chunk_s) / predict.FULL
    return StepTimes(fixed_s, sequence_s, key_s, chunk_s, token_s, pair_s)


def table(workers: int, replicas: int, asked: Workload, slo: Slo, step: StepTimes, capacity: Capacity) -> str:
    """The best split of the workers, of so many replicas each, and its neighbours by the number of prefill workers."""
    whole = best(workers * replicas, asked, slo, step, capacity)
    # a worker's replicas have one duty, so the split of workers is that of replicas
    found = [(_workers(split, replicas), expected) for split, expected in whole if not split.prefill % replicas]
    (first, chosen), most = found[0], max(expected.goodput for _, expected in found)
    lines = [f"best: {_name(first)}; {chosen.why}", "", f"{'split':<24}{'goodput':>10}{'TTFT':>10}{'TPOT':>10}"]
    for split, expected in sorted(found, key=lambda row: (row[0].both, row[0].prefill)):
        bar = "#" * round(BAR * expected.goodput / max(most, 1e-9))
        ttft, tpot = (f"{1e3 * one:,.0f} ms" if one < 60 else "-" for one in (expected.ttft_s, expected.tpot_s))
        lines.append(f"{_name(split):<24}{expected.goodput:>8.2f}/s{ttft:>10}{tpot:>10}  {bar}".rstrip())
    return "\n".join(lines)


def _workers(split: DutySplit, replicas: int) -> DutySplit:
    return DutySplit(split.prefill // replicas, split.decode // replicas, split.both // replicas)


def _name(split: DutySplit) -> str:
    if split.both:
        return f"{split.both} unified"
    return f"{split.prefill} prefill + {split.decode} decode"
