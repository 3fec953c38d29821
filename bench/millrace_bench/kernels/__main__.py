"""Times every op of millrace_kernels: a table, then one JSON line, which also says what the time did not reach.

millrace bench kernels [--group moe] [--op fp8_linear] [--device cpu] [--quick] [--seconds 120] [--out kernels.json]
"""

import importlib
import math
import time
from collections.abc import Iterator

import torch
from millrace_kernels.backend import capability
from millrace_load import options
from millrace_load.record import Record, print_record

from millrace_bench.kernels.case import Case
from millrace_bench.kernels.driver import HEADER, as_dict, line, measure

GROUPS = ("dense", "attention", "absorb", "moe", "sampling", "rivals")


def cases(groups: list[str], op: str, device: torch.device) -> Iterator[Case]:
    for group in groups:
        for case in importlib.import_module(f"millrace_bench.kernels.{group}").cases(device):
            if op in case.op:
                yield case


def main() -> None:
    parser = options.CommandLine("millrace bench kernels", "Time the ops.")
    parser.add_argument("--group", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--op", default="", help="only ops whose name contains this")
    parser.add_argument("--device", type=options.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one input set, few samples: whether everything runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further case after this time")
    parser.add_argument("--out", type=options.output, help="a file for the JSON line, rewritten after every case")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    device = torch.device(args.device)
    if device.type == "cuda":
        wake(device)
    rows: list[dict[str, object]] = []
    left_out: list[str] = []
    results = {"rows": rows, "left_out": left_out}  # they are still to come
    record = Record("kernels", {**vars(args), "capability": capability(device)}, results)
    print(HEADER)
    for case in cases(args.group, args.op, device):
        if time.monotonic() > until:
            left_out.append(f"{case.op} {case.shape}")
        else:
            for row in measure(case, device, args.quick):
                print(line(row), flush=True)
                rows.append(as_dict(row))
        if args.out:
            args.out.write_text(record.to_json() + "\n", encoding="utf-8")
    print_record(record)


def wake(device: torch.device, products: int = 200) -> None:
    """An idle GPU runs at a fraction of its clock: work for about a quarter of a second."""
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(products):
        torch.mm(x, x)
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
