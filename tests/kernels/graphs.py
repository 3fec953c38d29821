"""CUDA graphs of what is tested."""

from collections.abc import Callable
from typing import Any

import torch


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a step, and its result. The step ran before, so nothing is compiled in a capture."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, step()
