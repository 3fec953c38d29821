"""The end of an attention or MLP of a tensor-parallel rank: sum over ranks + residual, RMS norm and FP8 form.

    one_shot, two_shot   our kernel, in its two ways (millrace_kernels/peer/reduce_norm.py)
    nccl                 torch.distributed's all-reduce and our norm
    symm_one, symm_two   the all-reduces of torch's symmetric memory and our norm
    norm                 our norm alone: what is left with one rank

A process per GPU. Microseconds of one call in a CUDA graph of 20 calls back to back, of the slowest rank. `error` is of
the normed rows against FP32, `same` whether all ranks have the same bits. Forms: what the consumer reads, the plain
rows (gate), FP8 ones (q_a, kv_a) or both (MoE); up to 16 rows there are plain ones alone.

millrace bench allreduce --ranks 2 --rows 1 2 4 8 16 32 64 128 256 512 1024 2048 4096
"""

import argparse
import functools
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Operand
from millrace_kernels.peer.reduce_norm import ReduceNorm, Ways
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, dequantised, rms_error
from millrace_load.options import CommandLine
from millrace_load.record import Record, Row, print_record, printed
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

from millrace_bench.processes import Ranks, call_us, slowest

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FORMS = {"plain": (False, True), "fp8": (True, False), "both": (True, True)}  # quant, plain
EPS = 1e-6
Result = tuple[Operand, Tensor]


class Rank:
    """The buffers of this process, and the ways that it is measured in."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        group, most = dist.group.WORLD, max(args.rows)
        assert group is not None
        self.group, self.device, self.repeats = group, device, args.repeats
        self.fused = {
            "one_shot": ReduceNorm(group, args.width, device, Ways(most, most)),
            "two_shot": ReduceNorm(group, args.width, device, Ways(0, most)),
        }
        self.reduced = torch.empty(most, args.width, dtype=torch.bfloat16, device=device)
        if device.type == "cuda":
            import torch.distributed._symmetric_memory as symmetric

            self.reduced = symmetric.empty(most, args.width, dtype=torch.bfloat16, device=device)
            symmetric.rendezvous(self.reduced, group)

    def rows(self, num: int, form: str) -> list[Row]:
        """One row per way."""
        width, rng = self.reduced.shape[1], torch.Generator().manual_seed(num)
        *parts, residual = (torch.randn(num, width, generator=rng).bfloat16() for _ in range(self.group.size() + 1))
        weight = torch.rand(width, generator=rng).bfloat16()
        total = (sum(part.float() for part in parts) + residual.float()).bfloat16()
        expected = F.rms_norm(total.float(), (width,), weight.float(), EPS)
        mine, residual, weight = (x.to(self.device) for x in (parts[self.group.rank()], residual, weight))
        rows = []
        for name, call in self._ways(mine, residual, weight, *FORMS[form]).items():
            self.reduced[:num].copy_(mine)
            operand, _ = call()
            row = {"rows": num, "form": form, "way": name, "us": round(call_us(call, self.repeats, self.device), 2)}
            if name != "norm":
                row |= {"error": round(_error(operand, expected), 5), "same": self._same(operand)}
            rows.append(row)
        return rows

    def _ways(
        self, mine: Tensor, residual: Tensor, weight: Tensor, quant: bool, plain: bool
    ) -> dict[str, Callable[[], Result]]:
        """Those of others sum in place, time after time: values of a timed call mean nothing."""
        group, reduced = self.group, self.reduced[: len(mine)]

        def norm(x: Tensor) -> Result:
            return rms_norm(x, residual, weight, EPS, quant=quant, plain=plain)

        def nccl() -> Result:
            dist.all_reduce(reduced, group=group)
            return norm(reduced)

        found: dict[str, Callable[[], Result]] = {
            name: functools.partial(fused, mine, residual, weight, EPS, quant=quant, plain=plain)
            for name, fused in self.fused.items()
        }
        found |= {"nccl": nccl, "norm": lambda: norm(mine)}
        if self.device.type == "cuda":
            one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
            found["symm_one"] = lambda: norm(one(reduced, "sum", group.group_name))
            found["symm_two"] = lambda: norm(two(reduced, "sum", group.group_name))
        return found

    def _same(self, operand: Operand) -> bool:
        mine = [] if operand.plain is None else [operand.plain]
        mine += [] if operand.fp8 is None else [operand.fp8.data, operand.fp8.scales.contiguous()]
        bits = torch.cat([x.view(torch.uint8).flatten() for x in mine]).cpu()
        of_all = [torch.empty_like(bits) for _ in range(self.group.size())]
        dist.all_gather(of_all, bits, group=self.group)
        return all(torch.equal(bits, other) for other in of_all)


def _error(operand: Operand, expected: Tensor) -> float:
    forms = [] if operand.plain is None else [operand.plain.float()]
    forms += [] if operand.fp8 is None else [dequantised(operand.fp8)]
    return max(rms_error(form.cpu(), expected) for form in forms)


def measure(dims: ParallelDims, device: torch.device, args: argparse.Namespace) -> list[Row]:
    """The rows of one rank of the world. Collective."""
    one, rows = Rank(args, device), []
    for num, form in itertools.product(args.rows, FORMS):
        if form == "plain" or num > SMALL_TOKENS:
            rows += one.rows(num, form)
    assert not any(fused.error.item() for fused in one.fused.values()), "a rank did not answer"
    return rows


def run(args: argparse.Namespace) -> list[Row]:
    """Times are the slowest rank's."""
    return slowest(Ranks(args.ranks, tensor_parallel=True).run(measure, args), "us")


def main() -> None:
    parser = CommandLine("millrace bench allreduce", "Sums over tensor-parallel ranks with the norm behind them.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    rows = printed(run(args))
    wrong = [row for row in rows if row.get("error", 0) > FP8_TOLERANCE or not row.get("same", True)]
    print(f"wrong: {wrong}" if wrong else "all results are right, and the same on all ranks")
    print_record(Record("allreduce", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
