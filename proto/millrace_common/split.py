"""What a number of replicas can do, by the time of their steps: the requests per second that stay within their limits,
for each split of the replicas into duties. Pure; `millrace plan`, the router's controller of duties and the simulator
predict with it.

1. Prefill replicas are a queue of prompts. Its wait has an exponential tail, and the prompt's own chunks come on top.
2. Replicas with streams reach the step time at which they hold as many sequences as come meanwhile:
   step = fixed / (1 - prompts' work - streams' work), both as parts of the time.
3. What the TPOT limit leaves of their steps is time for prompts: a second queue, beside that of the prefill replicas.
4. A replica of both duties is one of streams, which runs all of its prompts itself and hands nothing over.

Overload does not last for ever: a queue that has grown for `HORIZON_S` is as long as its load made it. So an
overloaded split still answers some requests in time, and a better split is better however large the load is.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from millrace_common.step_times import AIM, StepTimes, prompt_pairs

HORIZON_S = 30.0  # an overload is assumed to last so long
SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # of the prompts that replicas with streams run themselves
JITTER = 0.02  # of a step's time, besides that of the number of sequences
NEVER_S = 1e9
LATE = 0.1  # of a request in time, that one is worth which is answered too late


@dataclass(frozen=True, slots=True)
class Workload:
    """A stream of requests that are alike."""

    input_tokens: float
    output_tokens: float
    rate: float  # requests per second
    cached_tokens: float = 0.0  # of the input, that need not be computed


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of a request in seconds; infinite: none."""

    ttft_s: float = math.inf  # until the first token
    tpot_s: float = math.inf  # mean time of each further one

    @property
    def limited(self) -> bool:
        return self.ttft_s < math.inf or self.tpot_s < math.inf


@dataclass(frozen=True, slots=True)
class DutySplit:
    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.both

    def __str__(self) -> str:
        parts = ((self.prefill, "prefill"), (self.decode, "decode"), (self.both, "both"))
        return " + ".join(f"{number} {duty}" for number, duty in parts if number) or "nothing"

    def plus(self, other: "DutySplit") -> "DutySplit":
        return DutySplit(self.prefill + other.prefill, self.decode + other.decode, self.both + other.both)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one replica."""

    max_running: int = 1 << 20  # sequences
    kv_tokens: int = 1 << 40  # in its pages
    chunk_tokens: int = 2048  # prompt tokens of a step
    handover_s: float = 0.0  # between the first token and the second, when another replica goes on


@dataclass(frozen=True, slots=True)
class Expected:
    """What a split makes of a workload."""

    goodput: float  # requests per second within both limits
    served: float  # requests per second that are answered at all
    ttft_s: float  # mean
    tpot_s: float  # mean
    decode_sequences: float  # of a replica with streams
    why: str  # what limits it, in words

    @property
    def worth(self) -> float:
        """Requests per second, late ones in part: where none is in time, the most that are answered is best."""
        return self.goodput + LATE * self.served


def expect(split: DutySplit, workload: Workload, slo: Slo, times: StepTimes, capacity: Capacity) -> Expected:
    """What the split makes of the workload, with the best share of prompts outside prefill replicas."""
    prefill, streams = split.prefill if split.decode else 0, split.decode + split.both
    if not streams:
        return Expected(0.0, 0.0, math.inf, math.inf, 0.0, "nobody generates")
    load = _Load(workload, slo, times, capacity)
    found = (load.expect(prefill, streams, share) for share in (SHARES if prefill else (1.0,)))
    return max(found, key=lambda expected: merit(expected, slo))


def splits(replicas: int) -> Iterator[DutySplit]:
    """Every split worth a look: all of both duties, or prefill beside decode. Replicas of decode run whole requests
    where that is better, so replicas of both duties beside them change nothing.
    """
    yield DutySplit(both=replicas)
    for prefill in range(1, replicas):
        yield DutySplit(prefill, replicas - prefill)


def best(
    replicas: int, workload: Workload, slo: Slo, times: StepTimes, capacity: Capacity
) -> list[tuple[DutySplit, Expected]]:
    """The splits of so many replicas, best first; of equal ones, the one that is further below the limits."""
    found = [(split, expect(split, workload, slo, times, capacity)) for split in splits(replicas)]
    return sorted(found, key=lambda row: merit(row[1], slo), reverse=True)


def merit(expected: Expected, slo: Slo) -> tuple[float, float]:
    """To compare splits: the higher one is better."""
    use = [expected.ttft_s / slo.ttft_s, expected.tpot_s / slo.tpot_s]
    return round(expected.goodput, 9), -max(part for part in use if not math.isnan(part))


class _Load:
    """A workload in seconds of a replica."""

    def __init__(self, workload: Workload, slo: Slo, times: StepTimes, capacity: Capacity) -> None:
        self.workload, self.slo, self.times, self.capacity = workload, slo, times, capacity
        self.uncached = uncached = max(workload.input_tokens - workload.cached_tokens, 1.0)  # prompt tokens to compute
        self.outputs = max(workload.output_tokens - 1, 0.0)  # tokens that decode steps make
        # Of a prompt: without the fixed part of its steps, and at a prefill replica that always has prompts
        pairs = prompt_pairs(workload.cached_tokens, uncached, capacity.chunk_tokens)
        self.work_s = times.token_s * uncached + times.pair_s * pairs
        chunks_s = (times.fixed_s + times.chunk_s) * uncached / capacity.chunk_tokens
        self.prompt_s = max(self.work_s + chunks_s, 1e-12)
        self.alone_s = times.prompt_s(math.ceil(uncached), int(workload.cached_tokens), capacity.chunk_tokens)
        self.keys = workload.input_tokens + self.outputs / 2  # cached tokens of a sequence, in the mean
        self.stream_s = times.sequence_s + times.key_s * self.keys  # of a sequence in each step
        length = workload.input_tokens + self.outputs
        self.most_sequences = max(min(capacity.max_running, capacity.kv_tokens / max(length, 1.0)), 1.0)

    def streams_most(self) -> float:
        """Streams per second that a replica without prompts can begin, by its places and its memory."""
        each = self.outputs * (self.times.fixed_s + self.most_sequences * self.stream_s)
        return self.most_sequences / (each or 1e-12)

    def prompts_beside(self, streams: float) -> float:
        """Prompts per second that a replica can compute beside the streams that it begins per second."""
        busy = streams * self.outputs * self.stream_s
        sequences = min(streams * self.outputs * AIM * min(self.slo.tpot_s, NEVER_S), self.most_sequences)
        each = self.work_s + self._chunks(sequences) * self.times.chunk_s or 1e-12
        left = max(1 - self.times.fixed_s / (AIM * self.slo.tpot_s), 0.0)
        return max(min((left - busy) / each, (1 - busy) / self.prompt_s), 0.0)

    def expect(self, prefill: int, streams: int, share: float) -> Expected:
        """`share` of the prompts is run by the replicas of streams."""
        rate, slo, times = self.workload.rate, self.slo, self.times
        begun = min(rate / streams, self.streams_most())
        local = min(share * rate / streams, self.prompts_beside(begun))
        step_s = self._step_s(local, begun)
        sequences = min(begun * self.outputs * step_s, self.most_sequences)
        handed_s = (1 - share) * self.capacity.handover_s / max(self.outputs, 1.0)
        alone_s = times.fixed_s + sequences * self.stream_s
        on_time = _below(alone_s, slo.tpot_s - handed_s, self.stream_s * math.sqrt(sequences) + JITTER * alone_s)
        queues = [
            (share, _Queue(share * rate, streams, self.prompts_beside(begun), self._beside_s(sequences))),
            (1 - share, _Queue((1 - share) * rate, prefill, 1 / self.prompt_s, self.alone_s)),
        ]
        used = [(part, queue) for part, queue in queues if part]
        room = _Queue(rate, streams, self.streams_most(), 0.0, servers=self.most_sequences)
        first = sum(part * queue.within(slo.ttft_s) for part, queue in used)
        wait_s = room.wait_s + sum(part * (queue.service_s + queue.wait_s) for part, queue in used)
        first *= room.within(slo.ttft_s)
        most = prefill / self.prompt_s + streams * self.prompts_beside(begun)
        served = min(rate, most, streams * self.streams_most())
        tpot_s = step_s + handed_s
        why = self._why(max(queue.use for _, queue in used), room.use, on_time)
        return Expected(rate * first * on_time, served, wait_s, tpot_s, sequences, why)

    def _step_s(self, local: float, begun: float) -> float:
        """The mean step of a replica that computes `local` prompts and begins `begun` streams per second. Prompts make
        no step longer than the limit.
        """
        busy = begun * self.outputs * self.stream_s
        alone_s = self.times.fixed_s / max(1 - busy, 1e-9)
        if not local:
            return alone_s
        sequences = min(begun * self.outputs * alone_s, self.most_sequences)
        prompts = local * (self.work_s + self._chunks(sequences) * self.times.chunk_s)
        return max(min(self.times.fixed_s / max(1 - prompts - busy, 1e-9), AIM * self.slo.tpot_s), alone_s)

    def _chunks(self, sequences: float) -> float:
        """Steps of a prompt's own beside streams, in chunks that the TPOT limit leaves; at least 1."""
        times, start, most = self.times, int(self.workload.cached_tokens), self.capacity.chunk_tokens
        left = AIM * min(self.slo.tpot_s, NEVER_S) - times.step_s(sequences, sequences * self.keys) - times.chunk_s
        chunk = most if not times.token_s else 1  # where not even the first token of a prompt has time
        if times.fits(left, 0):
            chunk = max(times.fits(left, start), times.fewest(times.chunk_s, start, most), 1)
        return max(self.uncached / min(chunk, most), 1.0)

    def _beside_s(self, sequences: float) -> float:
        """Until a prompt beside streams is done."""
        chunks, alone_s = self._chunks(sequences), self.times.fixed_s + sequences * self.stream_s
        prompts_s = chunks * self.times.chunk_s + self.work_s
        left = 1 - alone_s / (AIM * self.slo.tpot_s)  # of the time, if the mean step is as long as the limit
        return max(prompts_s + chunks * alone_s, min(prompts_s / left, NEVER_S) if left > 0 else NEVER_S)

    def _why(self, prompts: float, room: float, on_time: float) -> str:
        if room > 1:
            return f"KV pages and places for {room:.0%} of the streams are needed"
        if on_time < 0.9:
            return "steps of the streams are too long"
        return f"prompts need {prompts:.0%} of the time for them" if prompts < 99 else "no time is left for prompts"


class _Queue:
    """Requests that `replicas` serve, each of them `each` per second."""

    def __init__(self, rate: float, replicas: int, each: float, service_s: float, servers: float = 1.0) -> None:
        """`service_s`: of one that need not wait; `servers`: that a replica serves at once."""
        self.use = rate / (replicas * each) if replicas and each else math.inf
        self.service_s = service_s if replicas and each else NEVER_S
        capacity = max(replicas * each, 1e-9)
        spare = capacity - rate
        # Twice the spare capacity, as of a queue with equal services; in an overload, by what it grows to.
        grown = 16 * capacity / HORIZON_S
        root = math.sqrt(spare * spare + grown)
        self._tail = spare + root if spare > 0 else grown / (root - spare)
        self._waits = min(self.use, 1.0) ** (math.sqrt(2 * (replicas * servers + 1)) - 1)

    @property
    def wait_s(self) -> float:
        return self._waits / self._tail

    def within(self, limit_s: float) -> float:
        """The probability that one is served in time."""
        left_s = limit_s - self.service_s
        return 1 - self._waits * math.exp(-self._tail * left_s) if left_s > 0 else 0.0


def _below(mean: float, limit: float, deviation: float) -> float:
    """The probability that a normal value is below a limit."""
    if math.isinf(limit):
        return 1.0
    return 0.5 * (1 + math.erf((limit - mean) / (max(deviation, 1e-12) * math.sqrt(2))))
