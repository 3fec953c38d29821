"""Expert load balancing: how uneven the ranks' work is, before and after `rebalance`, and what that is worth.

    window   tokens of the busiest rank over the mean, mean of the layers; the loads are not those of the plan
    step     the same of single steps of `--rows` rows per rank, replicas in turns as the ranks take them
    moved    share of the slots that get another expert

Loads follow a power law (the k-th expert of a layer is chosen k^-a times as often as the first, in random order), or
are counted in the trained checkpoint: the plan is made from one half of the held-out texts, the rest from the other.
Steps on GPUs with skewed gates: `python -m millrace_bench.replicas --skew "power law" --spare 0 1`.

millrace bench balance                                  no device: R = 2, 8, 72
"""

import asyncio
import statistics
import time

import numpy as np
import torch
from millrace_cli.cluster import TINY
from millrace_load.options import CommandLine
from millrace_load.record import Record, Row, print_record, printed
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Request, RequestId, SamplingParams, Submit
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.eplb.balance import imbalance, rebalance
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.moe import Gate, Moe
from millrace_serve.model.parallel import ParallelDims

from millrace_bench.data import TEXTS

LAYERS, EXPERTS, TOP_K, STEPS = 8, 256, 8, 20
EXPONENTS = (0.25, 0.5, 1.0)
RANKS, SPARE = (2, 8, 72), (0, 1, 4)
SKEWS = {"even": 0.0, "power law": 0.05, "power law, sorted": 0.1}  # of the gates' biases: a step in the logarithm


def power_law(exponent: float, rng: np.random.Generator) -> np.ndarray:
    """Shares of the choices, float64 [L, E]."""
    shares = np.arange(1, EXPERTS + 1) ** -exponent
    return np.stack([rng.permutation(shares / shares.sum()) for _ in range(LAYERS)])


def trace(texts: tuple[str, ...]) -> np.ndarray:
    """Choices in the trained checkpoint, int64 [MoE layers, E]."""
    tokenizer = Tokenizer.load(TINY)
    limits = Limits(num_pages=200, max_model_len=1024, max_prefill_tokens=1024, prefix_cache=False)
    rank = load_rank(limits, Role.UNIFIED, TINY, ParallelDims(), torch.device("cpu"), torch.float32, Execution())
    gates = gates_of(rank.runner._model)  # type: ignore[arg-type]
    for gate in gates:
        gate.loads = torch.zeros(gate.bias.shape, dtype=torch.int32)
    engine, sampling = rank.engine(), SamplingParams(max_tokens=1, temperature=0.0)
    for room, text in enumerate(texts):
        tokens = asyncio.run(tokenizer.encode(text, add_bos=True))
        engine.submit(Submit(Request(id=RequestId(room, 0), token_ids=tokens, sampling=sampling)))
    while engine.has_work():
        engine.step()
    engine.close()
    return np.stack([gate.loads.numpy() for gate in gates]).astype(np.int64)  # type: ignore[union-attr]


def gates_of(model: DeepseekV3) -> list[Gate]:
    return [layer.mlp.gate for layer in model.layers if isinstance(layer.mlp, Moe)]


def first_placement(shape: tuple[int, ...], num_ranks: int, spare: int) -> ExpertPlacement:
    """As a worker begins; where experts do not divide by the ranks, the first ones have more replicas."""
    num_layers, num_experts = shape
    if num_experts % num_ranks == 0:
        return ExpertPlacement.contiguous(num_layers, num_experts, num_ranks, spare)
    slots = -(-num_experts // num_ranks) + spare
    experts = np.arange(num_ranks * slots, dtype=np.int32).reshape(num_ranks, slots) % num_experts
    return ExpertPlacement(np.broadcast_to(experts, (num_layers, *experts.shape)), num_experts)


def of_steps(shares: np.ndarray, placement: ExpertPlacement, rows: int, rng: np.random.Generator) -> float:
    """Mean imbalance of single steps; a row's choices may be equal."""
    _, num_ranks, slots = placement.experts.shape
    top_k, found = min(TOP_K, placement.num_experts // 4), []
    for layer, chance in enumerate(shares):
        places = placement.places(layer)[:, :-1]
        turns = np.repeat(np.arange(rows * num_ranks) % len(places), top_k)
        for _ in range(STEPS):
            chosen = rng.choice(len(chance), len(turns), p=chance)
            of_rank = np.bincount(places[turns, chosen] // slots, minlength=num_ranks)
            found.append(of_rank.max() / of_rank.mean())
    return statistics.mean(found)


def compare(routing: str, planned: np.ndarray, later: np.ndarray, ranks: int, spare: int, rows: int) -> Row:
    """`planned`, `later`: choices or shares [L, E] of two windows."""
    rng, before = np.random.default_rng(0), first_placement(planned.shape, ranks, spare)
    started = time.perf_counter()
    after = rebalance(planned, before)
    seconds = time.perf_counter() - started
    shares = later / later.sum(axis=1, keepdims=True)
    return {
        "routing": routing, "ranks": ranks, "slots": before.experts.shape[2],
        "window_before": round(float(imbalance(later, before).mean()), 3),
        "window_after": round(float(imbalance(later, after).mean()), 3),
        "step_before": round(of_steps(shares, before, rows, rng), 3),
        "step_after": round(of_steps(shares, after, rows, rng), 3),
        "moved": round(float((before.experts != after.experts).mean()), 3), "plan_ms": round(seconds * 1e3, 1),
    }  # fmt: skip


def pure(rows: int) -> list[Row]:
    rng, found = np.random.default_rng(0), []
    for exponent in EXPONENTS:
        shares = power_law(exponent, rng)
        windows = [rng.multinomial(200 * EXPERTS, layer, size=2) for layer in shares]
        planned, later = np.stack(windows, axis=1)
        found += [compare(f"power law {exponent}", planned, later, r, s, rows) for r in RANKS for s in SPARE]
    planned, later = trace(TEXTS[::2]), trace(TEXTS[1::2])
    return found + [compare("trained, 8 experts", planned, later, r, s, rows) for r in (2, 4) for s in SPARE[:2]]


def skew(model: DeepseekV3, name: str) -> None:
    """Biases that make some experts more likely, the same on every rank; sorted: those of the first rank."""
    rng = torch.Generator().manual_seed(0)
    for gate in gates_of(model):
        order = torch.arange(len(gate.bias)) if "sorted" in name else torch.randperm(len(gate.bias), generator=rng)
        gate.bias.copy_(-SKEWS[name] * (order + 1).float().log())


def main() -> None:
    parser = CommandLine("millrace bench balance", "Expert load balancing.")
    parser.add_argument("--rows", type=int, default=128, help="rows of a rank in a step")
    args = parser.parse_args()
    rows = printed(pure(args.rows))
    print_record(Record("balance", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
