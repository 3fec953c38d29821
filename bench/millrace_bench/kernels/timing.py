"""The time of a call on its device, without the host's part.

On a GPU the calls are captured in one CUDA graph, which is replayed between two events. A list of calls that do the
same work on different inputs keeps the inputs out of the L2 cache, as weights are in a model.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from millrace_bench.stamps import milliseconds, stamp, synchronize

Call = Callable[[], object]
CALLS_PER_GRAPH = 16  # at least, so that the launch of the graph does not count
SAMPLE_S = 2e-3  # of one sample, at least


def time_us(
    calls: Sequence[Call], device: torch.device, samples: int = 7, calls_per_graph: int = CALLS_PER_GRAPH
) -> float:
    """Median microseconds of one call, after a warm-up. `calls` differ in their inputs only."""
    assert calls and samples > 0
    num = -(-calls_per_graph // len(calls)) * len(calls)
    run, num = (_graph(calls, num), num) if device.type == "cuda" else (_each(calls), len(calls))
    repeats = max(1, round(SAMPLE_S / max(_seconds(run, 1, device), 1e-9)))
    return statistics.median(_seconds(run, repeats, device) for _ in range(samples)) / (repeats * num) * 1e6


def _each(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    run()
    return run


def _graph(calls: Sequence[Call], num: int) -> Call:
    """One replayable graph of all calls, repeated up to `num` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, loads, allocates
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num):
            calls[index % len(calls)]()
    graph.replay()
    return graph.replay


def _seconds(run: Call, repeats: int, device: torch.device) -> float:
    start = stamp(device)
    for _ in range(repeats):
        run()
    end = stamp(device)
    synchronize(device)
    return milliseconds(start, end) / 1e3
