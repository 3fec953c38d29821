"""Steps of 8 and 72 GPUs, from what two were measured to take.

The figures of docs/explanation/scaling.md come from exchange.json (dispatch and combine by rows) and ranks.json (steps
of two ranks with and without an exchange). The assumptions are the constants below; that page has their reasons.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

MOE_LAYERS, TOP_K, EXPERTS, WIDTH, EXPERT_WIDTH = 58, 8, 256, 7168, 2048
EXPERT_BYTES = 3 * WIDTH * EXPERT_WIDTH  # FP8
FLOPS_PER_ROW = 2 * EXPERT_BYTES
READ_BYTES_PER_S, GROUPED_FLOPS = 3.66e12, 1.25e15  # measured: 33 experts of 128 tokens in 397 us; DeepGEMM, many rows
REMOTE_RANKS = {2: 1.0, 8: 3.5}  # of a row, with 4 of 8 groups; every row of two ranks chooses both
REMOTE_HOSTS = 3.5  # of a prompt's row on 9 hosts: it is sent once to each
NIC_BYTES_PER_S = 46e9  # that DeepEP reports for its low-latency mode over 400 Gb/s InfiniBand
ROW_BYTES = (WIDTH + 4 * WIDTH // 128, 2 * WIDTH)  # FP8 with scales to the experts, BF16 back


@dataclass(frozen=True, slots=True)
class Fit:
    """us of dispatch and combine = fixed + per_row * rows * remote ranks of a row"""

    fixed: float
    per_row: float

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Fit":
        """By least squares of the relative error: small sizes count as much as large ones."""
        sizes = [(row["rows"], row["us"]) for row in rows if row["way"] == "both"]
        tokens, us = (np.array(column, float) for column in zip(*sizes, strict=True))
        (fixed, per_row), *_ = np.linalg.lstsq(np.stack((1 / us, tokens / us), 1), np.ones(len(us)), rcond=None)
        return cls(float(fixed), float(per_row))

    def us(self, rows: int, remote_ranks: float) -> float:
        return self.fixed + self.per_row * rows * remote_ranks


def experts_us(num_held: float, rows: float) -> float:
    """One layer's products: `num_held` experts with `rows` rows in all."""
    return 1e6 * max(num_held * EXPERT_BYTES / READ_BYTES_PER_S, rows * FLOPS_PER_ROW / GROUPED_FLOPS)


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    gpus: int
    ms: float
    exchange_ms: float
    tokens: int  # of a rank

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.ms * 1e3


def steps(fit: Fit, ranks: list[dict[str, Any]]) -> list[Step]:
    """Of every size that was measured with `peer` and with none."""
    by = {(row["exchange"], row["kind"], row["count"], row["length"]): row["ms"] for row in ranks}
    found = []
    for exchange, kind, count, length in by:
        if exchange == "peer":
            tokens = count * (1 if kind == "decode" else length)
            sizes = by["none", kind, count, length], by["peer", kind, count, length]
            found += _of_size(f"{kind} {count} x {length:,}", tokens, sizes, fit)
    return found


def _of_size(name: str, tokens: int, measured: tuple[float, float], fit: Fit) -> list[Step]:
    alone, together = measured
    transfer = {ranks: MOE_LAYERS * fit.us(tokens, remote) / 1e3 for ranks, remote in REMOTE_RANKS.items()}
    waiting = together - alone - transfer[2]  # ranks for each other, and twice the rows to sort
    one_host = [Step(name, gpus, alone + waiting + transfer[gpus], waiting + transfer[gpus], tokens) for gpus in (2, 8)]
    return [*one_host, _between_hosts(name, tokens, alone, waiting)]


def _between_hosts(name: str, tokens: int, alone: float, waiting: float) -> Step:
    """72 GPUs with 288 places for the 256 experts, 4 on each and the shared one, over RDMA."""
    gpus, chosen = 72, tokens * TOP_K
    fewer = experts_us(33, chosen + tokens) - experts_us(288 / gpus + 1, chosen + tokens)
    # a message for each expert of another host in decode, one for each other host in prefill
    remote = TOP_K * (1 - 8 / gpus) if name.startswith("decode") else REMOTE_HOSTS
    wire = MOE_LAYERS * tokens * remote * sum(ROW_BYTES) / NIC_BYTES_PER_S * 1e3
    exchange = waiting + wire
    return Step(name, gpus, alone - MOE_LAYERS * fewer / 1e3 + exchange, exchange, tokens)
