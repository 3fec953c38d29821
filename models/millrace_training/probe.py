"""A look at the tasks during training: the share of held-out items whose whole answer is the likeliest continuation.

With the right answer as input this equals greedy generation being exactly right, at the price of one forward pass.
"""

import torch
from millrace_bench.tasks import TASKS, Item, Turn
from torch import Tensor

from millrace_training.batches import ChatEncoder
from millrace_training.config import PAD_ID, ModelConfig
from millrace_training.model import DeepseekV3

PROBE_SEED = 1_000_000  # not the evaluation's
ITEMS = 32


class Probe:
    def __init__(self, encode: ChatEncoder, device: str, items: int = ITEMS) -> None:
        self.device = device
        self.batches = {
            name: _batch([_encoded(encode, item) for item in task.items(PROBE_SEED, items)])
            for name, task in TASKS.items()
        }
        self._eager: DeepseekV3 | None = None

    @torch.no_grad()
    def __call__(self, model: DeepseekV3) -> dict[str, float]:
        """Accuracy by task; runs an uncompiled copy, since every task has its own shape."""
        model_copy = self._copy(model.config)
        model_copy.load_state_dict(model.state_dict())
        accuracies = {}
        for name, (tokens, answers) in self.batches.items():
            tokens, answers = tokens.to(self.device), answers.to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                hidden = model_copy.hidden(tokens[:, :-1])
                right = model_copy.lm_head(hidden).argmax(-1) == tokens[:, 1:]
            accuracies[name] = round((right | ~answers[:, 1:]).all(-1).float().mean().item(), 3)
        return accuracies

    def _copy(self, config: ModelConfig) -> DeepseekV3:
        if self._eager is None:
            self._eager = DeepseekV3(config).to(self.device).eval()
        return self._eager


def _encoded(encode: ChatEncoder, item: Item) -> tuple[list[int], list[bool]]:
    texts = [message.content for message in item.messages] + [item.answer]
    tokens, answers = encode([Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)])
    last = len(answers) - answers[::-1].index(False)  # only the last answer counts
    return tokens, [answer and i >= last for i, answer in enumerate(answers)]


def _batch(rows: list[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [N, T] and answer mask [N, T]."""
    length = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([row + [PAD_ID] * (length - len(row)) for row, _ in rows])
    return tokens, torch.tensor([mask + [False] * (length - len(mask)) for _, mask in rows])
