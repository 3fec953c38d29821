"""Muon for the matrices of the layers, AdamW for embedding, head, gates and norms.

Muon orthogonalises the momentum (Newton-Schulz) and scales it to AdamW's typical update size, so that both take one
learning rate (arXiv:2502.16982, section 2.2).
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from millrace_training.recipe import Recipe

MOMENTUM = 0.95
UPDATE_RMS = 0.2  # AdamW's, as seen in practice
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAMW_LR = 0.5  # of Muon's


def orthogonalize(matrices: Tensor) -> Tensor:
    """[N, rows, cols] -> near-orthogonal matrices of the same row and column spaces, in bfloat16."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Parameters are matrices or stacks of matrices. The momentum is bfloat16: less state to carry for a resume."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.bfloat16)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # the base class casts to the parameter's dtype
            state["momentum"] = state["momentum"].bfloat16()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape[-2:]].append(p)
            for params in by_shape.values():
                self._update(params, group["lr"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        rows, cols = params[0].shape[-2:]
        grads = [p.grad.bfloat16() for p in params if p.grad is not None]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        nesterov = torch._foreach_lerp(grads, momenta, MOMENTUM)
        stacked = torch.cat([update.view(-1, rows, cols) for update in nesterov])
        updates = orthogonalize(stacked).float() * (UPDATE_RMS * max(rows, cols) ** 0.5)
        pieces = updates.split([p.numel() // (rows * cols) for p in params])
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        torch._foreach_add_(params, [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)], alpha=-lr)


def make_optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        other = p.ndim < 2 or name.startswith(("embed_tokens", "lm_head")) or name.endswith("mlp.gate.weight")
        (others if other else matrices).append(p)
    adamw = torch.optim.AdamW(
        others, lr=recipe.lr(0), betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=others[0].is_cuda
    )
    return [Muon(matrices, recipe.lr(0), recipe.weight_decay), adamw]


def set_lr(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr if isinstance(optimizer, Muon) else lr * ADAMW_LR
