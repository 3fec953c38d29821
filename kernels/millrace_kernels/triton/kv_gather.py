"""A page is contiguous here and there, so one program copies CHUNK numbers of it, whatever rows they belong to."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.host_table import host_table

CHUNK = 4096


def kv_gather(kv: Tensor, page_table: Tensor, starts: Sequence[int], lens: Sequence[int]) -> Tensor:
    page_size, width = kv.shape[1:]
    assert kv.stride(2) == 1 and kv.stride(1) == width and page_table.stride(1) == 1, (kv.stride(), page_table.stride())
    dtype = torch.bfloat16 if kv.dtype == torch.float8_e4m3fn else kv.dtype
    out = kv.new_empty(sum(lens), width, dtype=dtype)
    if out.numel():
        first_pages = tuple(start // page_size for start in starts)
        first_rows = tuple(accumulate(lens, initial=0))[:-1]
        table = host_table((first_pages, tuple(lens), first_rows), kv.device)
        per_page = triton.cdiv(page_size * width, CHUNK)
        _gather[(triton.cdiv(max(lens), page_size) * per_page, len(lens))](
            out, kv, page_table, table,
            len(lens), kv.stride(0), page_table.stride(0),
            WIDTH=width, PAGE=page_size, PER_PAGE=per_page, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_seqs", "page_table_row"], do_not_specialize_on_alignment=["page_table_ptr"])
def _gather(
    out_ptr, kv_ptr, page_table_ptr, table_ptr,
    num_seqs, kv_page, page_table_row,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, PER_PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    page, seq = tl.program_id(0) // PER_PAGE, tl.program_id(1)
    rows = tl.load(table_ptr + num_seqs + seq) - page * PAGE  # of the sequence, from this page on
    if rows > 0:
        first_page = tl.load(table_ptr + seq)
        first_row = tl.load(table_ptr + 2 * num_seqs + seq)
        physical = tl.load(page_table_ptr + seq * page_table_row + first_page + page).to(tl.int64)
        inside = tl.program_id(0) % PER_PAGE * CHUNK + tl.arange(0, CHUNK)
        mask = inside < tl.minimum(rows, PAGE) * WIDTH
        values = tl.load(kv_ptr + physical * kv_page + inside, mask=mask, other=0.0)
        where = out_ptr + (first_row + page * PAGE).to(tl.int64) * WIDTH + inside
        tl.store(where, values.to(out_ptr.dtype.element_ty), mask=mask)
