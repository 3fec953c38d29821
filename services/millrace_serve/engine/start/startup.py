"""The start of a rank from a loaded model to READY: measure and plan memory, compile kernels, capture graphs. Every
function here is collective over the ranks of the worker: they run the same profiling runs.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from millrace_common import gc_hooks
from millrace_kernels import fp8, indexer

from millrace_serve.engine.cache.kv_pool import PLAIN, SUMMED, KvLayout, KvPool
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.start import memory, profiling_run
from millrace_serve.engine.start.activations import MOST_PEERS, activation_bytes
from millrace_serve.engine.start.compile import compiled
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.profiling_run import StepShape
from millrace_serve.engine.step.chunk_graphs import chunk_buckets_up_to
from millrace_serve.engine.step.device import Device, device_of
from millrace_serve.engine.step.graphs import DecodeGraphs, Forward, buckets_up_to, graph_keys
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.attn_step import FORMS, FormThresholds
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.checkpoint.shapes import weight_bytes
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import Kept, kept_forms, runs_quantised
from millrace_serve.plan.settings import prompt_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankSetup:
    """A rank's model, limits and device."""

    role: Role
    limits: Limits
    execution: Execution
    model: ModelConfig
    layout: KvLayout
    dims: ParallelDims
    device: torch.device
    dtype: torch.dtype

    @property
    def graphs(self) -> bool:
        wanted = self.execution.graphs
        return self.device.type == "cuda" if wanted == "auto" else wanted != "off"

    @property
    def buckets(self) -> tuple[int, ...]:
        """Rows of the graphs of decode steps; a prefill worker has no such steps."""
        if not self.graphs or self.role is Role.PREFILL:
            return ()
        graphs = self.execution.graphs
        return buckets_up_to(self.limits.max_running, graphs if isinstance(graphs, tuple) else ())

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """Rows of the graphs of steps with prompt chunks, the decode rows beside them included. Sparse attention has
        more than a gap could bring along.
        """
        if not self.graphs or self.model.index_topk:
            return ()
        wanted = self.execution.chunk_graph_tokens
        if wanted == "auto":
            wanted = prompt_rows(self.model, self.dims.tp)
        decodes = 0 if self.role is Role.PREFILL else self.most_rows - self.limits.max_prefill_tokens
        return chunk_buckets_up_to(min(wanted + decodes, self.most_rows)) if wanted else ()

    @property
    def num_graphs(self) -> int:
        """Of decode steps. With several rows of a sequence each has a second one (engine/step/graphs.py)."""
        keys = graph_keys(self.buckets, self.limits.num_queries)
        return len(keys) * (2 if self.limits.most_queries > 1 else 1)

    @property
    def most_rows(self) -> int:
        """Of a step."""
        limits = self.limits
        return limits.max_prefill_tokens + limits.max_running * limits.most_queries

    @property
    def kept(self) -> Kept:
        """The forms of its weights."""
        return kept_forms(self.model, runs_quantised(self.device, self.dtype))

    @property
    def thresholds(self) -> FormThresholds:
        heads = self.model.num_attention_heads // self.dims.tp
        return FORMS.get(self.execution.form) or FormThresholds.measured(self.device, heads)

    @property
    def largest_step(self) -> StepShape:
        return profiling_run.largest(self.limits, self.thresholds.prefix_chunk_tokens)

    def random_weights(self) -> RandomWeights:
        """In the forms in which the rank keeps the checkpoint's."""
        return RandomWeights(self.device, self.dtype, self.kept)


def kv_layout(
    limits: Limits, execution: Execution, model: ModelConfig, model_hash: str, dtype: torch.dtype
) -> KvLayout:
    """Of the pages of a rank with activations in `dtype`. Raises ValueError: the model does not support the limits."""
    if model.index_topk and limits.context_parallel_tokens:
        tokens = limits.context_parallel_tokens
        text = f"limits.context_parallel_tokens={tokens}: must be 0 for a model with sparse attention (index_topk)"
        raise ValueError(text)
    kv_dtype = str(dtype).removeprefix("torch.") if execution.kv_dtype == "auto" else execution.kv_dtype
    return KvLayout(
        page_size=limits.page_size,
        num_layers=model.num_kv_layers,
        dtype=kv_dtype,
        index_row_bytes=model.index_row_bytes(kv_dtype),
        latent_width=model.kv_lora_rank,
        rope_width=model.qk_rope_head_dim,
        layout_id=SUMMED if "checksum" in limits.checks else PLAIN,
        canary="canary" in limits.checks,
        model_hash=model_hash,
    )


def estimated(setup: RankSetup, outside_torch: int) -> memory.Demand:
    """Before the weights are read. `outside_torch`: bytes that are known, of the libraries' memory."""
    weights, step = weight_bytes(setup.model, setup.dims, setup.dtype, setup.kept), setup.largest_step
    prefix = min(step.chunks * step.prefix, setup.thresholds.prefix_chunk_tokens)
    sampled = setup.limits.max_running * setup.limits.most_queries
    activations = activation_bytes(setup.model, setup.dims, step.num_tokens, prefix, sampled)
    return memory.Demand(weights, activations, _estimated_graphs(setup), memory.CONTEXT_BYTES + outside_torch)


def _estimated_graphs(setup: RankSetup) -> int:
    shapes = profiling_run.decode_shapes(setup.limits, setup.buckets)
    buckets = setup.chunk_buckets if setup.dims.dp <= MOST_PEERS else ()  # DeepEP has no graphs of chunks
    decode, chunks = max((one.num_tokens for one in shapes), default=0), max(buckets, default=0)
    shared = sum(activation_bytes(setup.model, setup.dims, rows) for rows in (decode, chunks))
    shared += _result_bytes(setup, decode)
    return memory.graph_reserve(setup.num_graphs + len(buckets), shared)


def _result_bytes(setup: RankSetup, rows: int) -> int:
    """Logits and hidden states of decode steps, which stay outside of the memory that graphs share."""
    return rows * (setup.model.vocab_size * 4 + setup.model.hidden_size * setup.dtype.itemsize)


def planned(setup: RankSetup, device_memory: memory.Memory, demand: memory.Demand) -> memory.MemoryPlan:
    """Raises memory.OverCommitted."""
    everybody = setup.limits.max_running * setup.limits.max_pages_per_seq + 1
    fraction, page_bytes = setup.execution.memory_fraction, setup.layout.page_bytes
    return memory.make_plan(setup.limits, device_memory, fraction, demand, page_bytes, everybody)


class MemoryPlanner:
    """1. made before anything is on the device; 2. `check` before the weights are read; 3. `pages` after."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self.outside_torch = 0  # bytes that are known, of the libraries' memory
        self.plans: list[memory.MemoryPlan] = []  # the estimated one, then the measured one
        self._memory = None
        if setup.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(setup.device)
            # what is there is ours
            self._memory = memory.Memory(total, free + torch.cuda.memory_reserved(setup.device))

    def check(self) -> int:
        """Return the bytes that are unused while the weights are read. Raises memory.OverCommitted when the weights and
        the estimates already do not fit.
        """
        if self._memory is None:
            return 0
        demand = estimated(self._setup, self.outside_torch)
        plan = planned(self._setup, self._memory, demand)
        self.plans.append(plan)
        log.info("memory, estimated before the weights are read:", extra={"lines": plan.table()})
        return plan.budget - demand.weights - demand.libraries

    def pages(self, model: DeepseekV3) -> int:
        """Pages of the KV pool, the same on every rank. Raises memory.OverCommitted."""
        if self._memory is None:
            wanted = self._setup.limits.num_pages
            assert wanted != "auto", "only the memory of CUDA devices is planned"
            memory.check_pages(wanted, self._setup.layout.page_bytes, memory.host_memory())
            return wanted
        plan = planned(self._setup, self._memory, self._measure(model))
        self.plans.append(plan)
        log.info("memory:", extra={"lines": plan.table()})
        # the pages of a sequence have the same ids on all ranks of its replica
        return min(map(int, self._setup.dims.exchange(str(plan.num_pages).encode())))

    def _measure(self, model: DeepseekV3) -> memory.Demand:
        """Run the largest step, and the largest step of the graphs, on a pool of the null page alone."""
        assert self._memory is not None
        setup, device = self._setup, device_of(self._setup.device)
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_allocated(setup.device)
        pool = KvPool.create(setup.layout, 2, setup.device)
        runner = TorchRunner(model, pool, setup.limits.resolved(2), setup.model.vocab_size, device)
        activations = self._peak(runner, setup.largest_step)
        if model.balancer is not None:  # experts move between two steps
            activations = max(activations, model.balancer.staging_bytes)
        graphs = self._chunk_graphs(runner, device)
        if setup.buckets:
            step = max(profiling_run.decode_shapes(setup.limits, setup.buckets), key=lambda shape: shape.num_tokens)
            shared = self._peak(runner, step) + _result_bytes(setup, step.num_tokens)
            graphs += memory.graph_reserve(setup.num_graphs, shared)
        runner.close()
        del runner, pool
        free = _free(setup.device)
        libraries = self._memory.free - free - torch.cuda.memory_reserved(setup.device)
        libraries = min(max(libraries, 0), memory.MOST_LIBRARY_BYTES + self.outside_torch)
        return memory.Demand(weights, activations, graphs, libraries)

    def _chunk_graphs(self, runner: TorchRunner, device: Device) -> int:
        """Bytes of the graphs of steps with prompt chunks: what is free again when they are gone. Each has hundreds of
        parts, of which no estimate was right.
        """
        graphs = runner.chunk_graphs(device, self._setup.chunk_buckets)
        if graphs is None:
            return 0
        runner.call(graphs.capture)
        taken = _free(self._setup.device)
        del graphs
        return max(_free(self._setup.device) - taken, 0)

    def _peak(self, runner: TorchRunner, shape: StepShape) -> int:
        """Bytes that a step needs besides what was allocated before it."""
        setup = self._setup
        before = torch.cuda.memory_allocated(setup.device)
        torch.cuda.reset_peak_memory_stats(setup.device)
        runner.launch(profiling_run.batch_of(shape, setup.limits, setup.dims.dp)).result()
        return torch.cuda.max_memory_allocated(setup.device) - before


def prepare(setup: RankSetup, config: EngineConfig, runner: TorchRunner, phases: Phases) -> None:
    """Compile and capture everything that `runner` will need, then freeze the garbage collector."""
    if setup.device.type == "cuda":
        with phases("compile"):
            compile_kernels(setup, config, runner)
    if setup.graphs:
        with phases("capture"):
            capture(setup, config, runner)
    if setup.graphs or setup.device.type == "cuda":
        gc_hooks.freeze()


def compile_kernels(setup: RankSetup, config: EngineConfig, runner: TorchRunner) -> None:
    """Those of steps that are no graphs."""
    shapes = profiling_run.prefill_shapes(config, setup.model.index_topk)
    if not setup.buckets and setup.role is not Role.PREFILL:
        shapes += profiling_run.decode_shapes(config, buckets_up_to(config.max_running))
    _profile(setup, runner, shapes)
    if config.context_parallel_tokens:
        runner.launch(profiling_run.shared_batch(config, setup.dims.dp, setup.dims.dp_rank)).result()
    most = profiling_run.most_rows(config, shapes, setup.thresholds.prefix_chunk_tokens)
    runner.call(lambda: fp8.compile_ahead(most, setup.device))
    if setup.model.index_topk:
        runner.call(lambda: indexer.compile_ahead(config.max_running * config.most_queries, setup.device))


def capture(setup: RankSetup, config: EngineConfig, runner: TorchRunner) -> None:
    """The graphs of all buckets, and each replayed, those of decode steps with greedy and other sampling."""
    device, graphs = device_of(setup.device), None
    chunk_graphs = runner.chunk_graphs(device, setup.chunk_buckets)
    if chunk_graphs is not None:  # first: they need more memory, which the others share
        runner.call(chunk_graphs.capture)
    if setup.buckets:
        graphs = DecodeGraphs(
            device,
            _forwards(setup, runner),
            runner.slots,
            setup.buckets,
            setup.dims.dp,
            runner.accept,
            setup.limits.num_queries,
        )
        runner.call(graphs.capture)
    runner.use_graphs(graphs, chunk_graphs)
    if chunk_graphs is not None:
        _profile(setup, runner, [profiling_run.chunk_shape(config, bucket) for bucket in chunk_graphs.buckets])
    if graphs is not None:
        _profile(setup, runner, list(profiling_run.decode_shapes(setup.limits, setup.buckets)), graphs=True)


def _profile(setup: RankSetup, runner: TorchRunner, shapes: list[StepShape], *, graphs: bool = False) -> None:
    for shape in shapes:
        runner.launch(profiling_run.batch_of(shape, setup.limits, setup.dims.dp, graphs=graphs)).result()
    tokens = [shape.num_tokens for shape in shapes]
    log.info("ran %d profiling steps of %d to %d tokens", len(shapes), min(tokens), max(tokens))


def _forwards(setup: RankSetup, runner: TorchRunner) -> Callable[[int], Forward]:
    """The functions to capture, by bucket."""
    plain, execution = runner.forward, setup.execution
    fast = compiled(plain) if execution.compile_max_batch else plain
    return lambda bucket: fast if bucket <= execution.compile_max_batch else plain


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
