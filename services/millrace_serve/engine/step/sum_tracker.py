"""The pages that a step completes, which get a checksum (engine/step/page_sums.py)."""

import numpy as np

from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.plan import Plan
from millrace_serve.engine.schedule.sequence import Sequence


class SumTracker:
    def __init__(self, config: EngineConfig) -> None:
        self._size = config.page_size
        self._summed = [0] * config.max_running  # leading pages of each slot's sequence with a checksum

    def join(self, seq: Sequence, num_tokens: int) -> None:
        """Full pages of the first `num_tokens` came with theirs."""
        self._summed[seq.slot] = num_tokens // self._size

    def build(self, plan: Plan) -> np.ndarray:
        """int64 [P]"""
        pages = [page for seq in plan.decode for page in self._new(seq, seq.num_computed // self._size)]
        for chunk in plan.chunks:
            last = chunk.samples and chunk.seq.exports
            pages += self._new(chunk.seq, -(-chunk.end // self._size) if last else chunk.end // self._size)
        return np.array(pages, np.int64)

    def _new(self, seq: Sequence, count: int) -> list[int]:
        first, self._summed[seq.slot] = self._summed[seq.slot], count
        return seq.pages[first:count]
