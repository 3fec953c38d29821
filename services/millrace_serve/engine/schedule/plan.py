"""What one step does (`Plan`, the scheduler's decision) and what came of it (`StepOutput`, the runner's answer)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from millrace_serve.engine.core import SamplingParams, TokenOutput, TopLogprob
from millrace_serve.engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, end) of one sequence. The chunk that ends the prompt also samples a token."""

    seq: Sequence
    start: int
    end: int
    samples: bool


@dataclass(slots=True)
class Plan:
    """Rows of the step in order: one token of each decode sequence, then the chunks."""

    decode: list[Sequence]
    chunks: list[Chunk]
    joined: list[Sequence] = field(default_factory=list)  # got their slot since the last plan
    grown: list[Sequence] = field(default_factory=list)  # got more pages since the last plan

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(slots=True)
class StepOutput:
    """Row s belongs to the s-th sampling sequence of the plan. K = the most logprobs that a row asked for."""

    tokens: np.ndarray  # int64 [S]
    logprobs: np.ndarray | None = None  # float32 [S]; of the sampled token
    top_ids: np.ndarray | None = None  # int64 [S, K]
    top_logprobs: np.ndarray | None = None  # float32 [S, K]
    corrupt: dict[int, str] = field(default_factory=dict)  # index of a sequence in the plan -> which page was wrong

    def token(self, row: int, token_id: int, params: SamplingParams) -> TokenOutput:
        if params.logprobs is None:
            return TokenOutput(token_id)
        assert self.logprobs is not None and self.top_ids is not None and self.top_logprobs is not None
        ids, values = self.top_ids[row, : params.logprobs], self.top_logprobs[row, : params.logprobs]
        top = tuple(map(TopLogprob, ids.tolist(), values.tolist()))
        return TokenOutput(token_id, float(self.logprobs[row]), top)
