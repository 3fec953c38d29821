"""Stands for the library `deep_ep` on a CPU: both modes over gloo, with what the library checks and documents.

Memory that the library leaves alone is NaN, and so are rows before their arrival was waited for.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from millrace_kernels.fp8 import BLOCK, reference_quant_groups
from millrace_kernels.moe_masked import BLOCK_ROWS
from torch import Tensor

FP8 = torch.float8_e4m3fn
Rows = tuple[Tensor, Tensor]  # E4M3, and float32 scales


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else 128 * hidden_bytes * num_ranks


class Event:
    def __init__(self, arrive: Callable[[], None]) -> None:
        self.current_stream_wait = arrive


class Buffer:
    num_sms = 20
    silent: tuple[int, ...] = ()  # ranks that do not answer

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, explicitly_destroy: bool = False, enable_shrink: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.low_latency, self.shrinks, self.qps = low_latency_mode, enable_shrink, num_qps_per_rank
        self.num_rdma_bytes, self.sends = num_rdma_bytes, 0
        assert num_nvl_bytes % 128 == num_rdma_bytes % 128 == 0
        assert explicitly_destroy and (num_rdma_bytes == 0 or low_latency_mode or self.size > 8)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(most: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return 4 * num_experts * most * (2 * hidden + 128)

    def _everybody(self, *mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, self.group)
        return found

    def destroy(self) -> None:
        dist.barrier(self.group)

    # ------------------------------------------------------------------------------------------------ normal mode

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        here = torch.stack([_local(topk_idx, num_experts // self.size, rank) >= 0 for rank in range(self.size)], 1)
        is_token_in_rank = here.any(2)
        per_expert = torch.bincount(topk_idx.flatten() + 1, minlength=num_experts + 1)[1:].int()
        return is_token_in_rank.sum(0).int(), None, per_expert, is_token_in_rank, None

    def dispatch(
        self, x: Rows, *, num_tokens_per_rank: Tensor, num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor, num_tokens_per_expert: Tensor, topk_idx: Tensor, topk_weights: Tensor,
        num_worst_tokens: int, async_finish: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert type(x) is tuple and x[0].dtype == FP8 and x[0].is_contiguous()
        assert x[1].shape == (len(x[0]), x[0].shape[1] // BLOCK) and x[1].dtype == torch.float32
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert async_finish and num_worst_tokens > 0
        sent = self._everybody(*_bits(x), topk_idx, topk_weights, is_token_in_rank)
        wanted = [source[4][:, self.rank] for source in sent]
        data, scales, ids, weights = (
            torch.cat([source[column][mine] for source, mine in zip(sent, wanted, strict=True)]) for column in range(4)
        )
        total, held = len(data), len(num_tokens_per_expert) // self.size
        assert total <= num_worst_tokens
        local = _local(ids, held, self.rank)
        recv = (*_nan(num_worst_tokens, x[0].shape[1]), torch.full((num_worst_tokens, ids.shape[1]), 1 << 40))
        shares = torch.full(recv[2].shape, torch.nan)

        def arrive() -> None:
            recv[0].view(torch.uint8)[:total], recv[1][:total], recv[2][:] = data, scales, -1
            recv[2][:total], shares[:total] = local, weights * (local >= 0)

        return recv[:2], recv[2], shares, [], (is_token_in_rank, [int(mine.sum()) for mine in wanted]), Event(arrive)

    def combine(self, x: Tensor, handle: tuple[Tensor, list[int]]) -> tuple[Tensor, None, None]:
        is_token_in_rank, counts = handle
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        out = torch.zeros(len(is_token_in_rank), x.shape[1])
        for rank, (parts,) in enumerate(self._everybody(x[: sum(counts)].split(counts))):
            out[is_token_in_rank[:, rank]] += parts[self.rank].float()
        return out.bfloat16(), None, None

    # ------------------------------------------------------------------------------------------------ low latency

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        most, held = num_max_dispatch_tokens_per_rank * self.size, num_experts // self.size
        assert self.low_latency and return_recv_hook and self.qps >= held
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] % 512 == 0
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.shape[1] <= 11
        assert len(x) <= num_max_dispatch_tokens_per_rank <= 1023 and num_max_dispatch_tokens_per_rank % 4 == 0
        assert most % BLOCK_ROWS == 0, "the products that follow write whole blocks of an expert"
        hint = self.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, x.shape[1], self.size, num_experts)
        assert self.num_rdma_bytes >= hint
        self.sends += 1
        sent = self._everybody(*_bits(reference_quant_groups(x)), topk_idx)
        came = [self._came([ids for *_, ids in sent], self.rank * held + expert) for expert in range(held)]
        data, scales = _nan(held * most, x.shape[1])
        data, scales = data.view(held, most, -1), scales.view(held, -1, most).transpose(1, 2)
        counts = torch.full((held,), -(1 << 30), dtype=torch.int32)

        def arrive() -> None:
            for expert, rows in enumerate(came):
                counts[expert] = len(rows)
                for at, (rank, token) in enumerate(rows):
                    data[expert].view(torch.uint8)[at], scales[expert, at] = sent[rank][0][token], sent[rank][1][token]

        return (data, scales), counts, (came, most, x.shape[1], num_experts), None, arrive

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: tuple[Any, ...]
    ) -> tuple[Tensor, None, None]:
        came, most, hidden, num_experts = handle
        assert x.shape == (num_experts // self.size, most, hidden) and x.dtype == torch.bfloat16 and x.is_contiguous()
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        parts = [x[expert, : len(rows)] for expert, rows in enumerate(came)]
        found: dict[tuple[int, int], Tensor] = {}  # (place, token of this rank) -> row
        for rank, (rows_of, results) in enumerate(self._everybody(came, parts)):
            for expert, (rows, result) in enumerate(zip(rows_of, results, strict=True)):
                mine = {token: at for at, (source, token) in enumerate(rows) if source == self.rank}
                found |= {(rank * len(came) + expert, token): result[at].float() for token, at in mine.items()}
        out = torch.zeros(len(topk_idx), hidden)
        for (token, choice), place in zip(torch.nonzero(topk_idx >= 0).tolist(), topk_idx[topk_idx >= 0], strict=True):
            out[token] += topk_weights[token, choice] * found[int(place), token]
        return out.bfloat16(), None, None

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        assert self.shrinks and mask_status.shape == (self.size,) and mask_status.dtype == torch.int32
        mask_status.copy_(torch.tensor([rank in self.silent for rank in range(self.size)]))

    def _came(self, ids: list[Tensor], place: int) -> list[tuple[int, int]]:
        """(rank, token) of the rows of a place, rank by rank, in an order that changes from call to call."""
        order = sorted(range(self.size), key=lambda rank: (rank * 5 + self.sends) % 7)
        return [(rank, token) for rank in order for token, _ in torch.nonzero(ids[rank] == place).tolist()]


def install() -> None:
    sys.modules["deep_ep"] = sys.modules[__name__]


def _local(topk_idx: Tensor, held: int, rank: int) -> Tensor:
    """Places -> slots of a rank, -1 elsewhere."""
    return torch.where((topk_idx >= 0) & (topk_idx // held == rank), topk_idx % held, -1)


def _bits(x: Rows) -> Rows:
    return x[0].view(torch.uint8), x[1]


def _nan(num: int, hidden: int) -> Rows:
    return torch.full((num, hidden), torch.nan).to(FP8), torch.full((num, hidden // BLOCK), torch.nan)
