"""Other processes compile a rank's kernels while the rank reads its weights. A rank alone would compile them one after
the other on one core: minutes with empty caches.

`beside` starts processes, each with a small model of the rank's widths and random weights. All run the same warm-up
steps, GEMMs and graphs, each from its own offset (docs/explanation/start.md). One that fails is named. The
rank goes on when all have ended, so that their memory is free before it measures its own.

A file in the cache folder (`mark`) means that all kernels are there; then no process is started. The log names
processes that fail, and the rank compiles the missing kernels. The processes end with the rank: their stdin is a pipe
that closes with it.
"""

import contextlib
import copy
import dataclasses
import fcntl
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import torch
from millrace_kernels import backend, fp8

from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import Role
from millrace_serve.engine.start import memory, profiling_run
from millrace_serve.engine.start.startup import RankSetup, capture
from millrace_serve.engine.step.device import device_of
from millrace_serve.engine.step.graphs import buckets_up_to
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.checkpoint.shapes import weight_bytes
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims

FOLDER = "complete"  # in the cache folder: an empty file for each fingerprint whose kernels are all there
COMMAND = (sys.executable, "-m", "millrace_serve.engine.start.compile_ahead")
MOST_PROCESSES = 8
LIMIT_S = 300.0  # after which the rank goes on without those that have not ended
WORK_BYTES = 2 << 30  # for the activations of most steps; those that need more are left to the rank
LIBRARIES = ("torch", "triton", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python")
# One process builds each of FlashInfer's modules under a lock; the others do not wait for it.
WITHOUT_FLASHINFER = {
    "indexer.top_keys": "",
    "mla_prefill.plan": "",
    "mla_prefill.mla_prefill": "millrace_kernels.triton.mla_prefill:mla_prefill",
}

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class CompilePart:
    """The input of one process."""

    setup: RankSetup
    index: int
    count: int
    num_bytes: int  # that torch may allocate: the rank's weights must find room beside all parts


def parts(setup: RankSetup, room: int) -> list[CompilePart]:
    """The inputs of the processes to start. `room`: bytes of the device that are unused while weights are read."""
    file = mark_file(setup)
    if file is None or file.exists():
        return []
    small, portable = small_config(setup.model), dataclasses.replace(setup, dims=alone(setup.dims))
    least = weight_bytes(small, portable.dims, setup.dtype, setup.kept) + WORK_BYTES + memory.CONTEXT_BYTES
    count = num_processes(len(os.sched_getaffinity(0)), room, least)
    return [CompilePart(portable, i, count, room // count - memory.CONTEXT_BYTES) for i in range(count)]


def num_processes(cores: int, room: int, least: int) -> int:
    """Number of processes by cores and memory; 0 instead of 1, because one alone is hardly faster than the rank."""
    count = min(cores, MOST_PROCESSES, room // least)
    return count if count > 1 else 0


@contextlib.contextmanager
def beside(
    setup: RankSetup, wanted: Sequence[CompilePart], command: Sequence[str] = COMMAND, limit_s: float = LIMIT_S
) -> Iterator[None]:
    """Context: processes compile during its body. Its end waits for them; a failure of the body kills them."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        running = []
        try:
            if wanted and _is_first(setup, stack):
                running = [stack.enter_context(_started(part, command)) for part in wanted]
        except Exception as error:  # no start is lost for a faster one
            log.warning("cannot compile ahead: %s: %s", type(error).__name__, error)
        yield
        failures = [why for process, errors in running if (why := _end(process, errors, started + limit_s))]
    if failures:
        log.warning("%d of %d processes that compile ahead failed: %s", len(failures), len(running), failures[0])
    if running:
        log.info("compiled ahead processes=%d seconds=%.1f", len(running), time.monotonic() - started)


def together(setup: RankSetup) -> None:
    """Wait for every rank, so that the others find the kernels of the first rank's processes."""
    if setup.device.type == "cuda":
        setup.dims.exchange(b"")


def mark(setup: RankSetup) -> None:
    """Mark the folder as complete, for all roles after a worker that does all. A read-only folder stays as it is."""
    for role in Role if setup.role in (Role.UNIFIED, Role.FLEXIBLE) else (setup.role,):
        if (file := mark_file(dataclasses.replace(setup, role=role))) is not None:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()


def mark_file(setup: RankSetup) -> Path | None:
    """The file of `mark`; None where nothing is compiled ahead: on CPUs, and without a cache folder."""
    folder = setup.execution.cache_dir
    if folder is None or setup.device.type != "cuda":
        return None
    return folder.expanduser() / FOLDER / fingerprint(setup, torch.cuda.get_device_name(setup.device))


def fingerprint(setup: RankSetup, device_name: str) -> str:
    """Hash of everything that decides the kernels: shapes, limits, libraries, and our own sources."""
    dims = dataclasses.replace(alone(setup.dims), rank=0)
    layout = msgspec.structs.replace(setup.layout, model_hash="")
    limits, attention = setup.limits.model_copy(update={"num_pages": "auto"}), setup.execution.attention
    facts = (setup.role, limits, setup.model, layout, dims, setup.dtype, attention, setup.buckets, setup.chunk_buckets)
    whole = hashlib.sha256(repr((device_name, *facts, *map(_version, LIBRARIES))).encode())
    for path in sorted(Path(backend.__file__).parent.rglob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:32]


def _version(library: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(library)
    return "absent"


def _is_first(setup: RankSetup, stack: contextlib.ExitStack) -> bool:
    """Whether this rank is the first that fills the folder with these kernels; until `stack` ends."""
    if (file := mark_file(setup)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context(file.with_suffix(".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextlib.contextmanager
def _started(part: CompilePart, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The process, which is gone afterwards, and what it writes to stderr."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # its exit code is reported
                pickle.dump(part, process.stdin)
                process.stdin.flush()
            yield process, errors
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], until: float) -> str:
    """Waits until then (of time.monotonic); why it failed, empty if it did not."""
    try:
        code = process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return "it took too long"
    if not code:
        return ""
    errors.seek(0)
    last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {code}: {last}"


def main() -> None:
    part: CompilePart = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    device = part.setup.device
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(part.num_bytes / total)
            if part.index:
                stack.enter_context(backend.forced(**WITHOUT_FLASHINFER))
        run(part)


def run(part: CompilePart) -> None:
    """Run steps, GEMMs and graphs. torch.compile is left out, because its result depends on all layers. Steps with
    prompt chunks are launched op by op, where one without memory is left out.
    """
    execution = part.setup.execution.model_copy(update={"compile_max_batch": 0, "chunk_graph_tokens": 0})
    backend.prefer(execution.libraries, part.setup.device)
    model = small_model(part.setup)
    layout = msgspec.structs.replace(part.setup.layout, num_layers=len(model.layers))
    setup = dataclasses.replace(part.setup, model=model.config, layout=layout, execution=execution)
    config = setup.limits.resolved(2)
    pool = KvPool.create(layout, config.num_pages, setup.device)
    runner = TorchRunner(model, pool, config, setup.model.vocab_size, device_of(setup.device))
    expanded = setup.thresholds.prefix_chunk_tokens
    shapes = [profiling_run.largest(config, expanded), *profiling_run.prefill_shapes(config, setup.model.index_topk)]
    shapes += [profiling_run.chunk_shape(config, rows) for rows in part.setup.chunk_buckets]
    if setup.role is not Role.PREFILL:
        shapes += profiling_run.decode_shapes(config, setup.buckets or buckets_up_to(config.max_running))
    for shape in turned(shapes, part.index, part.count):
        with contextlib.suppress(torch.OutOfMemoryError):
            runner.launch(profiling_run.batch_of(shape, config, setup.dims.dp)).result()
    most = profiling_run.most_rows(config, shapes, expanded)
    runner.call(lambda: fp8.compile_ahead(most, setup.device, part.index / part.count))
    if setup.buckets:
        capture(setup, config, runner)
    runner.close()


def small_model(setup: RankSetup) -> DeepseekV3:
    """Three layers, of which the last two share their weights; only the last one leaves out rows (`sampled_only`).
    An MTP layer comes on top of them, and writes its KV where the last one does.
    """
    model = DeepseekV3(setup.random_weights(), small_config(setup.model), setup.dims, setup.thresholds)
    whole = copy.copy(model.layers[-1])
    whole.sampled_only = False
    model.layers.insert(-1, whole)
    return model


def small_config(config: ModelConfig) -> ModelConfig:
    """A layer of each kind; what has one kind only has two of it."""
    dense = min(config.first_k_dense_replace, 1) if config.is_moe(config.num_hidden_layers - 1) else 2
    return config.model_copy(update={"num_hidden_layers": 2, "first_k_dense_replace": dense})


def alone(dims: ParallelDims) -> ParallelDims:
    """A rank of the same shapes without other ranks."""
    return dataclasses.replace(dims, world_group=None, tp_group=None, dp_group=None)


def turned(items: Sequence[T], index: int, count: int) -> list[T]:
    """All items, from the index-th of `count` parts on, wrapping around."""
    first = len(items) * index // count
    return [*items[first:], *items[:first]]


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
