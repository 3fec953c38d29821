"""One step: `Plan`, the scheduler's decision, and `StepOutput`, the runner's answer."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from millrace_serve.engine.core import Failure, TokenOutput, TopLogprob
from millrace_serve.engine.schedule.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Prompt tokens [start, end) of one sequence. The chunk that ends the prompt also samples a token."""

    seq: Sequence
    start: int
    end: int
    samples: bool
    shared: bool = False  # all replicas compute it, each a part of its rows


@dataclass(frozen=True, slots=True)
class ContextParallelTurn:
    """The next step may have one shared chunk: agreed among the replicas in the step before."""

    mine: bool
    replicas: int


class Work(NamedTuple):
    """What a step's time depends on (millrace_common/step_times.py). Nothing at all: the time tells nothing."""

    sequences: int = 0  # that decode
    keys: int = 0  # cached tokens of these
    tokens: int = 0  # of prompts
    pairs: float = 0.0  # `chunk_pairs` of these


NOTHING = Work()


@dataclass(slots=True)
class Plan:
    """Rows of the step in order: those of each decode sequence (its last token and drafts), then the chunks. At most
    one chunk is shared, the last one.
    """

    decode: list[Sequence]
    chunks: list[Chunk]
    joined: list[Sequence] = field(default_factory=list)  # got their slot since the last plan
    grown: list[Sequence] = field(default_factory=list)  # got more pages since the last plan
    wants_turn: bool = False  # a prompt here waits for its next shared chunk
    began: float = 0.0  # when it was made, on the scheduler's clock
    limit_s: float = math.inf  # TPOT of its decode sequences
    spare_s: float = math.inf  # by which prompts may make the step longer within these limits
    awaited: bool = False  # the next step needs its tokens: a mask of a grammar depends on them
    work: Work = NOTHING  # of the replica with most of it

    @property
    def shared(self) -> Chunk | None:
        return self.chunks[-1] if self.chunks and self.chunks[-1].shared else None


@dataclass(slots=True)
class StepOutput:
    """Row s belongs to the s-th sampling sequence of the plan: its first `counts[s]` tokens were accepted.

    q is the step's num_queries; K is the most logprobs that a row asked for.
    """

    tokens: np.ndarray  # int64 [S, q]
    counts: np.ndarray  # int64 [S], 1..q
    drafted: np.ndarray  # int64 [S], how many of its rows had drafts
    drafts: np.ndarray  # int64 [S, ...], of the tokens behind the newest one; -1: none
    logprobs: np.ndarray | None = None  # float32 [S, q]; of the sampled tokens
    top_ids: np.ndarray | None = None  # int64 [S, q, K]
    top_logprobs: np.ndarray | None = None  # float32 [S, q, K]
    corrupt: dict[int, Failure] = field(default_factory=dict)  # by the index of the sequence in the plan

    @classmethod
    def nothing(cls) -> Self:
        """Of a step without sampling sequences."""
        none = np.zeros(0, np.int64)
        return cls(none[:, None], none, none, none[:, None])

    def accepted(self) -> list[list[int]]:
        """The accepted tokens of each sampling sequence."""
        rows: list[list[int]] = self.tokens.tolist()
        if self.tokens.shape[1] > 1:
            rows = [row[:count] for row, count in zip(rows, self.counts.tolist(), strict=True)]
        return rows

    def drafts_of(self, row: int) -> tuple[int, ...]:
        """The known drafts of a sampling sequence."""
        return tuple([draft for draft in self.drafts[row].tolist() if draft >= 0])

    def outputs(self, row: int, tokens: list[int], seq: Sequence) -> list[TokenOutput]:
        """The first accepted tokens of a row, with as many logprobs as the request of `seq` asks for."""
        if self.logprobs is None or (count := seq.request.sampling.logprobs) is None:
            # map is slow for one
            return [TokenOutput(tokens[0])] if len(tokens) == 1 else list(map(TokenOutput, tokens))
        assert self.top_ids is not None and self.top_logprobs is not None
        ids, values = self.top_ids[row, :, :count].tolist(), self.top_logprobs[row, :, :count].tolist()
        tops = [tuple(map(TopLogprob, *top)) for top in zip(ids, values, strict=True)]
        return list(map(TokenOutput, tokens, self.logprobs[row].tolist(), tops))
