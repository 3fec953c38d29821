"""The differences between a CUDA device and a CPU for the runner of steps.

A CUDA device works asynchronously: memory that it copies from must be pinned, an event marks a point of its work, and a
graph replays many launches as one. On a CPU work is done when the call returns: an event is nothing, and a replay is
the call itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Replay = Callable[[], None]
Gap = Callable[..., None]  # of the tensors that it reads
ReplayParts = Callable[[Gap], None]
Wait = Callable[[], None]

CAPTURE_MODE = "thread_local"  # other threads, such as NCCL's watchdog, may use the device meanwhile


class Device:
    """The interface of a device, and a CPU."""

    torch = torch.device("cpu")

    def bind(self) -> None:
        """Make it the current device of the calling thread."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the host; copies between it and the device need no waiting."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, host: Tensor, memory: Tensor | None) -> Tensor:
        """`host` on the device: copied to the beginning of `memory`, or itself where that is the same place."""
        return host

    def record(self) -> Wait:
        """Return a function that waits until all work launched so far is done, and raises an error of the device."""
        return lambda: None

    def capture(self, run: Callable[[], None]) -> Replay:
        """`run` launches work of fixed shapes on fixed memory; the replay does that work again. Captures share their
        scratch memory: a result must be copied to memory of its own before the end of `run`.
        """
        return run

    def capture_parts(self, run: Callable[[Gap], None]) -> ReplayParts:
        """As `capture`, for work with gaps: `run` calls its argument where work belongs that differs from replay to
        replay, with the tensors that this work reads. The replay calls its own argument there, with the same tensors.
        """
        return run

    def synchronize(self) -> None:
        """Wait until all work is done."""


class Cuda(Device):
    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch = torch.device("cuda", index)
        # Of all captures: memory that one has freed serves another on the same stream only, and cuBLAS has a workspace
        # for each stream.
        self._graph_memory: Any = None  # torch's handle
        self._capture_stream: torch.cuda.Stream | None = None

    def bind(self) -> None:
        torch.cuda.set_device(self.torch)

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, host: Tensor, memory: Tensor | None) -> Tensor:
        assert memory is not None, "a CUDA device has memory of its own"
        return memory[: host.shape[0]].copy_(host, non_blocking=True)

    def record(self) -> Wait:
        event = torch.cuda.Event(blocking=True)  # a spinning thread would take the interpreter from the launching one
        event.record()
        return event.synchronize

    def capture(self, run: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        memory, stream = self._place()
        with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode=CAPTURE_MODE):
            run()
        return graph.replay

    def capture_parts(self, run: Callable[[Gap], None]) -> ReplayParts:
        graphs: list[torch.cuda.CUDAGraph] = []
        gaps: list[tuple[Tensor, ...]] = []  # a gap between each two graphs
        memory, stream = self._place()

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=memory, capture_error_mode=CAPTURE_MODE)

        def gap(*tensors: Tensor) -> None:
            graphs[-1].capture_end()
            gaps.append(tuple(map(_borrowed, tensors)))
            begin()

        self.synchronize()
        torch.cuda.empty_cache()  # for the graphs, which take memory of their own
        with torch.cuda.stream(stream):
            begin()
            try:
                run(gap)
            finally:
                graphs[-1].capture_end()

        first, *others = graphs

        def replay(gap: Gap) -> None:
            first.replay()
            for tensors, graph in zip(gaps, others, strict=True):
                gap(*tensors)
                graph.replay()

        return replay

    def _place(self) -> tuple[Any, torch.cuda.Stream]:  # Any: torch's handle
        """Memory and stream of captures."""
        if self._capture_stream is None:
            self._graph_memory, self._capture_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.torch)
        return self._graph_memory, self._capture_stream

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)


class _Memory:
    """Bytes of a device, for torch.as_tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _borrowed(tensor: Tensor) -> Tensor:
    """The same memory, not owned: what is captured behind it may use that memory once `tensor` is gone."""
    storage = tensor.untyped_storage()
    whole = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def device_of(device: torch.device) -> Device:
    return Cuda(device) if device.type == "cuda" else Device()
