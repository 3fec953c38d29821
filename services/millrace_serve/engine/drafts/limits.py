"""How many draft tokens a sequence may have in a step, and so how many rows; which numbers were the fastest."""

from collections.abc import Mapping
from typing import Annotated

from millrace_common.config import Config, Count, OrAuto
from pydantic import Field

from millrace_serve.model.config import ModelConfig, ModelConfigError

MOST_DRAFTS = 3  # less than model/yarn.py has rows behind the last position
# The most sequences of a step with one draft of each, two, three: V3 on an H200 (docs/explanation/speculative.md).
DRAFT_BATCHES = (256, 32, 16)


class DraftLimits(Config):
    # Most per sequence and step; 0: the KV page has no MTP layer.
    draft_tokens: Annotated[int, OrAuto()] = Field(0, ge=0, le=MOST_DRAFTS)
    draft_batches: Annotated[tuple[Annotated[Count, Field(ge=0)], ...], OrAuto()] = DRAFT_BATCHES

    @property
    def most_queries(self) -> int:
        """Rows of a decode sequence in a step at most: its last token and drafts."""
        return 1 + self.draft_tokens

    def num_queries(self, num_sequences: int) -> int:
        """Rows of each decode sequence in a step that samples so many sequences."""
        return 1 + sum(num_sequences <= most for most in self.draft_batches[: self.draft_tokens])

    def layers_of(self, model: ModelConfig, name: object = "the model") -> ModelConfig:
        """The layers of the model that are loaded. Raises ModelConfigError, which calls the model `name`."""
        if self.draft_tokens and not model.num_nextn_predict_layers:
            why = f"draft_tokens={self.draft_tokens}: {name} has no MTP layer (num_nextn_predict_layers)"
            raise ModelConfigError(why)
        return model if self.draft_tokens else model.without_mtp()


def best_batches(gains: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    """The most sequences with which one more draft was faster than one less, by the number of drafts. `gains`:
    how many times faster than without drafts, by drafts and sequences.
    """
    most: list[int] = []
    for level in range(1, MOST_DRAFTS + 1):
        better = [n for (drafts, n), gain in gains.items() if drafts == level and gain > gains.get((level - 1, n), 1.0)]
        if not better:
            break
        most.append(min([max(better), *most[-1:]]))
    return tuple(most)
