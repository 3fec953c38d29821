"""kv[slot // page_size, slot % page_size] = [c_kv | k_pe]"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def kv_store(kv: Tensor, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
    """Writes one row per token into one layer of the pool, in place. A step's own tokens: see `mla_qkv_norm`.

    Args:
        kv: [num_pages, page_size, C+R], any page stride.
        slots: int64 [T]; several tokens may share a slot of the sink page, which then holds any one of them.
        c_kv: [T, C]; k_pe: [T, R]; cast to kv's dtype, E4M3 saturates.
    """
    assert kv.shape[-1] == c_kv.shape[-1] + k_pe.shape[-1] and slots.shape[0] == c_kv.shape[0] == k_pe.shape[0]
    implementation("kv_store.kv_store", kv.device)(kv, slots, c_kv, k_pe)
