"""Flags in peer memory: int32 words that one rank sets and another waits for.

A flag holds an epoch, the number of its last use. Epochs live in device memory and kernels increment them, so a CUDA
graph replays them. They are compared by their difference, so they may wrap around.
"""

import triton
import triton.language as tl

POLLS_PER_S = 3_700_000  # of `wait_all` on an H200
FOREVER = (1 << 31) - 1  # polls; a rank may compile for minutes before all are ready


@triton.jit
def peer(bases, rank, offset, DTYPE: tl.constexpr):
    """Pointer to what lies `offset` bytes behind the begin of a rank's block; offset is a multiple of 16."""
    return tl.multiple_of((tl.load(bases + rank) + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def signal_all(bases, offset, value, SIZE: tl.constexpr):
    """Sets the flag at `offset` of all SIZE ranks' blocks, behind everything that this program has written before.

    What other programs wrote is behind it too, if this program has seen an atomic of theirs with "release".
    """
    pad: tl.constexpr = triton.next_power_of_2(SIZE)
    ranks = tl.arange(0, pad)
    tl.debug_barrier()  # the writes of all threads before the flags
    flags = (tl.load(bases + ranks, mask=ranks < SIZE, other=0) + offset).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, value, mask=ranks < SIZE, sem="release", scope="sys")


@triton.jit
def wait_all(flags, value, spins, error, SIZE: tl.constexpr):
    """Polls this rank's flags, which lie next to each other in rank order, until all are `value` or newer; what the
    peers wrote before their signals is then readable.

    Reads of a peer's memory after it take cache_modifier=".cg": L1 may hold older lines. After `spins` polls a missing
    rank + 1 goes into the error word, and the kernel goes on with whatever it finds. Nothing else ends the loop: it has
    barriers, so that all warps must leave it together, and they would read the error word at different times.
    """
    pad: tl.constexpr = triton.next_power_of_2(SIZE)
    ranks = tl.arange(0, pad)
    left = spins
    seen = tl.atomic_add(flags + ranks, 0, mask=ranks < SIZE, sem="acquire", scope="sys")
    late = (ranks < SIZE) & (seen - value < 0)
    missing = tl.max(tl.where(late, 1 + ranks, 0), axis=0)
    while (missing > 0) & (left > 1):
        seen = tl.atomic_add(flags + ranks, 0, mask=ranks < SIZE, sem="acquire", scope="sys")
        late = (ranks < SIZE) & (seen - value < 0)
        missing = tl.max(tl.where(late, 1 + ranks, 0), axis=0)
        left -= 1
    if missing > 0:
        tl.atomic_cas(error, 0, missing)
    tl.debug_barrier()  # no thread reads before the one that polled is done
