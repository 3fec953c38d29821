"""The border between an MoE layer and the ranks that hold its experts.

Implementations: `local` for one replica, `gather` for several; `gather` is the oracle of faster exchanges. An
implementation owns w13 and w2. It decides in which form rows travel (BF16, FP8) and how a rank sorts those that arrive
(by token, or by expert with counts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.experts.held import ExpertLayer, HeldExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.lane import Stages


class RoutedExperts(Protocol):
    """sum over the chosen experts of weight_e * expert_e(h) for this replica's T tokens."""

    held: HeldExperts
    local: bool  # only tokens of this replica take part, so a call may leave out rows of the step
    fuses_shared: bool  # the result contains the shared expert's output
    tp_partial: bool  # the result is this rank's part of a sum over the TP group
    overlaps: bool  # two parts of a step may be under way, each in a lane of its own (model/overlap.py)

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Stages[Tensor]:
        """Sends the tokens to their experts; the returned stages compute them and bring the results back.

        Work launched before the stages and in their pauses overlaps with transfers. In a CUDA graph all sizes depend
        on T and on `inputs.dp_num_tokens` alone. Collective, unless `local`.

        Args:
            h: [T, D]; weights: float32 [T, K]; ids: int32 [T, K] experts of the model, -1 for padding.
        Returns:
            stages that return [T, D]; their first pause is behind the first experts, whose results are under way.
        """
        ...


MakeExperts = Callable[[int], RoutedExperts]  # by layer
Implementation = Callable[[ExpertLayer], RoutedExperts]


def nothing(x: Tensor) -> Stages[Tensor]:
    """The stages of a step in which no rank has a row: x [0, D]."""
    yield from ()
    return x
