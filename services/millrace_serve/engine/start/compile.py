"""torch.compile of the forward of decode steps, which graphs then capture; and the announcement of Triton's kernels.

Our ops and the collectives stay as they are: to the compiler they are calls that it does not look into, and what lies
between two of them becomes a kernel. The calls cost time in Python only, which a captured graph does not spend.
"""

import torch

from millrace_serve.engine.step.graphs import Forward
from millrace_serve.engine.step.runner import Announce

NOT_TRACED = ("millrace_kernels", "millrace_serve.model.parallel", "deep_gemm", "flash_mla", "flashinfer", "triton")
RECOMPILES = 64  # of one function: layers differ in kind, and steps in rows


def compiled(forward: Forward, backend: str = "inductor") -> Forward:
    from torch._dynamo import config, trace_rules  # seconds to import

    config.recompile_limit = max(config.recompile_limit, RECOMPILES)
    for module in NOT_TRACED:
        trace_rules.add(module)  # nothing where it is not installed
    return torch.compile(forward, backend=backend)


def announce_kernels(announce: Announce) -> None:
    """From now on the compilation of a kernel, which takes seconds, is announced; call it before a kernel's first use.

    Triton's own hook serves it badly: it does not end when a compilation fails.
    """
    from triton import compiler

    compile_kernel = compiler.compile

    def announced(*args: object, **options: object) -> object:
        with announce("the compilation of a kernel"):
            return compile_kernel(*args, **options)

    compiler.compile = announced
