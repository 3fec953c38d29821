"""The exchange of rows between two GPUs: results, races, graphs, a peer that is gone."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from millrace_kernels.fp8 import SMALL_TOKENS, Fp8, Operand, quant_groups
from millrace_kernels.peer.exchange import Exchange, ExpertPlaces, Received
from millrace_kernels.testing.tolerances import dequantised
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.held import ExpertLayer
from millrace_serve.model.experts.peer import PeerExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims, init_parallel
from millrace_serve.model.quantised import FP8, PLAIN
from millrace_testing.checkpoint import CONFIG
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE, assert_close
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SIZE, WIDTH, EXPERTS, TOP_K, MOST = 2, 7168, 64, 8, 96
COUNTS = [(64, 64), (1, 1), (8, 8), (9, 8), (0, 5), (30, 3), (MOST, 0), (16, MOST)]


def make_exchange(width: int = WIDTH, top_k: int = TOP_K) -> Exchange:
    assert dist.group.WORLD is not None
    device = torch.device("cuda", torch.cuda.current_device())
    return Exchange(dist.group.WORLD, device, MOST, width, top_k + 1, torch.bfloat16)


def equal_to_gather(dims: ParallelDims) -> None:
    """Routed experts alone: bit for bit where both compute equally many rows, so with the same kernels."""
    config = ModelConfig.parse({**CONFIG, "hidden_size": 1024, "moe_intermediate_size": 512, "n_shared_experts": 0})
    device, top_k = torch.device("cuda", dims.rank), config.num_experts_per_tok
    placement = ExpertPlacement.contiguous(config.num_kv_layers, config.n_routed_experts, SIZE)
    for fp8 in (True, False):
        weights = RandomWeights(device, torch.bfloat16, FP8 if fp8 else PLAIN)
        layer = ExpertLayer(weights, config, dims, placement, 1)
        peer = PeerExperts(make_exchange(1024, top_k), layer)
        gather = GatherExperts(layer)
        gather.held = peer.held
        for seed, counts in enumerate(COUNTS):
            rng, num = torch.Generator("cuda").manual_seed(10 * seed + dims.rank), counts[dims.rank]
            h = Operand(torch.randn(num, 1024, generator=rng, device="cuda").bfloat16(), None)
            ids = torch.rand(num, config.n_routed_experts, generator=rng, device="cuda").topk(top_k).indices.int()
            gains = torch.rand(num, top_k, generator=rng, device="cuda")
            ids[3:5] = -1  # padding
            inputs = cast(ForwardInput, SimpleNamespace(dp_num_tokens=counts))
            found, expected = (way.begin(h, gains, ids, inputs)() for way in (peer, gather))
            if counts[0] == counts[1]:
                assert torch.equal(found, expected), (fp8, counts)
            assert_close(found, expected, FP8_EXPERTS_TOLERANCE)
        assert peer.exchange.error.item() == 0


class Rows:
    """Inputs of all ranks, which every rank knows, so that each can check its own results. A rank's experts multiply a
    row by the rank + 1.
    """

    def __init__(self) -> None:
        rng = torch.Generator("cuda").manual_seed(0)  # equal devices draw equal numbers
        self.x = torch.randn(SIZE, 2 * MOST, WIDTH, generator=rng, device="cuda").bfloat16()
        ids = torch.rand(SIZE, 2 * MOST, EXPERTS, generator=rng, device="cuda").topk(TOP_K).indices.int()
        ids[:, ::3] = ids[:, ::3] % (EXPERTS // SIZE)  # experts of rank 0 alone
        ids[:, 1::3] = ids[:, 1::3] % (EXPERTS // SIZE) + EXPERTS // SIZE  # of rank 1 alone
        ids[:, 5::7] = -1  # padding
        self.ids = ids
        self.gains = torch.rand(SIZE, 2 * MOST, TOP_K, generator=rng, device="cuda")
        table = torch.arange(EXPERTS + 1, dtype=torch.int32, device="cuda")
        table[-1] = -1
        self.places = ExpertPlaces(table[None], EXPERTS // SIZE)

    def expected(self, x: Tensor, ids: Tensor, quant: bool) -> Tensor:
        total = torch.zeros(x.shape, device="cuda")
        for rank in range(SIZE):
            chosen = ((ids >= 0) & (ids // self.places.slots == rank)).any(1)
            sent = Operand(None, quant_groups(x)) if quant else Operand(x, None)
            total += torch.where(chosen[:, None], _times(sent, rank + 1).float(), 0.0)
        return total.bfloat16()


def _times(rows: Operand, factor: int) -> Tensor:
    values = rows.plain if rows.plain is not None else dequantised(cast(Fp8, rows.fp8))
    return (values.float() * factor).bfloat16()


def _experts(received: Received, rank: int) -> None:
    """Rows without an expert here get NaN: nobody may read them."""
    chosen = (received.slots >= 0).any(1, keepdim=True)
    received.partial.copy_(torch.where(chosen, _times(received.rows, rank + 1), torch.nan))


def races(dims: ParallelDims) -> int:
    """Wrong values of 1,000 steps, each kernel behind a delay that other ranks do not have; every tenth is a graph of
    six layers, whose rows change from replay to replay.
    """
    together, alone, rows, rank = random.Random(0), random.Random(dims.rank + 1), Rows(), dims.rank
    exchange, wrong = make_exchange(), torch.zeros(1, dtype=torch.int64, device="cuda")
    static = [tensor[rank, :MOST].clone() for tensor in (rows.x, rows.gains, rows.ids)]

    def sleep() -> None:
        torch.cuda._sleep(alone.choice((0, 0, 1_000, 20_000, 200_000)))

    def layer(x: Tensor, gains: Tensor, ids: Tensor, counts: list[int]) -> None:
        quant = sum(counts) > SMALL_TOKENS
        sleep()
        received = exchange.dispatch(x, gains, ids, rows.places, counts, shared=False, quant=quant)
        sleep()
        _experts(received, rank)
        out = exchange.combine(ids, rows.places, counts, shared=False)
        wrong.add_((out != rows.expected(x, ids, quant)).sum())

    def step(first: int, counts: tuple[int, int]) -> None:
        num = counts[rank]
        x, gains, ids = (tensor[rank, first : first + num] for tensor in (rows.x, rows.gains, rows.ids))
        layer(x, gains, ids, list(counts))

    step(0, (20, 20))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for num in (1, MOST, 8, 9, 64, 1):
            x, gains, ids = (tensor[:num] for tensor in static)
            layer(x, gains, ids, [num] * SIZE)
    for index in range(1000):
        first = together.randrange(MOST)
        counts = together.choice(COUNTS)
        if index % 10:
            step(first, counts)
            continue
        for fixed, tensor in zip(static, (rows.x, rows.gains, rows.ids), strict=True):
            fixed.copy_(tensor[rank, first : first + MOST])
        graph.replay()
    assert exchange.error.item() == 0
    return int(wrong.item())


def gone(dims: ParallelDims) -> tuple[int, float]:
    """The error word when rank 1 dies before the second step, and how long the wait took."""
    rows, exchange, rank = Rows(), make_exchange(), dims.rank
    exchange.answer_within(5.0)
    began = 0.0
    for step in range(2):
        if step == 1:
            dist.barrier()
            if rank == 1:
                os._exit(0)
            exchange.answer_within(0.03)
        torch.cuda.synchronize()
        began = time.monotonic()
        x, gains, ids = (tensor[rank, :20] for tensor in (rows.x, rows.gains, rows.ids))
        received = exchange.dispatch(x, gains, ids, rows.places, [20, 20], shared=False, quant=True)
        _experts(received, rank)
        exchange.combine(ids, rows.places, [20, 20], shared=False)
    return int(exchange.error.item()), time.monotonic() - began


def _main(rank: int, function: Callable[[ParallelDims], Any], folder: str) -> None:
    torch.cuda.set_device(rank)
    dims = init_parallel(rank, 1, SIZE, f"file://{folder}/rendezvous", torch.device("cuda", rank), 120.0)
    torch.save(function(dims), Path(folder) / f"{rank}.pt")
    os._exit(0)  # a peer may be gone, and the end of a group waits for it


def on_ranks(function: Callable[[ParallelDims], Any], folder: Path) -> list[Any]:
    mp.spawn(_main, (function, str(folder)), nprocs=SIZE)
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


def test_results_of_gather(tmp_path: Path) -> None:
    assert on_ranks(equal_to_gather, tmp_path) == [None, None]


def test_delays_change_nothing_in_graphs_and_outside(tmp_path: Path) -> None:
    assert on_ranks(races, tmp_path) == [0, 0]


def test_peer_that_is_gone_is_in_the_error_word(tmp_path: Path) -> None:
    ((error, seconds),) = on_ranks(gone, tmp_path)
    assert error == 2 and seconds < 5, (error, seconds)
