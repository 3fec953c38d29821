"""The border between an MoE layer and the ranks that hold its experts.

Implementations: `local` for one replica, `gather` for several; `gather` is the oracle of faster exchanges. An
implementation owns w13 and w2. It decides in which form rows travel (BF16, FP8) and how a rank sorts those that arrive
(by token, or by expert with counts).
"""

from collections.abc import Callable
from typing import Protocol

from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.experts.held import ExpertLayer, HeldExperts
from millrace_serve.model.inputs import ForwardInput

Finish = Callable[[], Tensor]


class RoutedExperts(Protocol):
    """sum over the chosen experts of weight_e * expert_e(h) for this replica's T tokens."""

    WEIGHTS: tuple[str, ...] = ("held",)
    held: HeldExperts
    local: bool  # only tokens of this replica take part, so a call may leave out rows of the step
    fuses_shared: bool  # the result contains the shared expert's output
    tp_partial: bool  # the result is this rank's part of a sum over the TP group
    captures_chunks: bool = True  # steps with prompt chunks can be graphs, as all others can

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        """Sends the tokens to their experts; what is returned computes them and brings the results back, [T, D].

        Work launched in between may overlap with the transfer. In a CUDA graph all sizes depend on T and on
        `inputs.dp_num_tokens` alone. Collective, unless `local`.

        Args:
            h: [T, D]; weights: float32 [T, K]; ids: int32 [T, K] experts of the model, -1 for padding.
        """


MakeExperts = Callable[[int], RoutedExperts]  # by layer
Implementation = Callable[[ExpertLayer], RoutedExperts]
