"""Prints the PTX of the reductions over peers for sm90, by width, as JSON (`python -m`): without Triton's interpreter,
which other tests of this process may have put in the place of its compiler.
"""

import json
import sys

import triton
from millrace_kernels.peer.reduce_norm import WARPS
from millrace_kernels.triton import reduce_norm
from millrace_kernels.triton.quant import BLOCK
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    **dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16"), "data": "*fp8e4nv", "scales": "*fp32",
    "bases": "*i64", **dict.fromkeys(("phases", "polls", "error"), "*i32"),
}  # fmt: skip
ALIGNED = {*POINTERS, "max_rows", "width", "x_stride", "residual_stride"}  # to 16


def ptx(name: str, width: int) -> str:
    options = {"SIZE": 2, "GROUPS": triton.next_power_of_2(width) // BLOCK, "PLAIN": True, "QUANT": True, "WHOLE": True}
    kernel = getattr(reduce_norm, name)
    types, fixed, aligned = {}, {}, {}
    for index, arg in enumerate(kernel.arg_names):
        if arg in options:
            types[arg], fixed[(index,)] = "constexpr", options[arg]
        else:
            types[arg] = POINTERS.get(arg, "fp32" if arg == "eps" else "i32")
        if arg in ALIGNED:
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, fixed, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS}).asm["ptx"]


if __name__ == "__main__":
    found = {f"{name} {width}": ptx(name, width) for name in ("one_shot", "two_shot") for width in (128, 256, 7168)}
    json.dump(found, sys.stdout)
