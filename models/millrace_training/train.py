"""Trains the model.

    python -m millrace_training.train --data DATA_DIR --tokenizer TOKENIZER_DIR --out OUT_DIR [--seconds S]

1. OUT_DIR/state.pt, if there is one, says where to go on; the recipe must be the same.
2. Each step: batch -> losses -> gradients -> Muon and AdamW -> the gates' bias update, V3's balancing without a loss.
3. Every LOG_EVERY steps one line goes to OUT_DIR/log.jsonl, every PROBE_EVERY steps with accuracies on held-out items.
4. After the last step, or after S seconds, state.pt is written; after the last step also OUT_DIR/checkpoint.
"""

import argparse
import json
import logging
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace_training import checkpoint
from millrace_training.batches import Batches, loader
from millrace_training.config import ModelConfig
from millrace_training.model import DeepseekV3
from millrace_training.optimizer import make_optimizers, set_lr
from millrace_training.probe import Probe
from millrace_training.recipe import Recipe

LOG_EVERY = 25
PROBE_EVERY = 250
MAX_GRAD_NORM = 1.0

log = logging.getLogger(__name__)


class Trainer:
    def __init__(self, config: ModelConfig, recipe: Recipe, device: str = "cpu") -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.step, self.tokens = recipe, device, 0, 0
        self.model = DeepseekV3(config).to(device)
        self.optimizers = make_optimizers(self.model, recipe)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
            for layer in (*self.model.layers, self.model.mtp):
                layer.compile()
            self.model._cross_entropy = torch.compile(self.model._cross_entropy)  # type: ignore[method-assign]

    def train_step(self, tokens: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """tokens and weights as from `Batches`; returns 0-dim tensors on the device."""
        tokens = tokens.to(self.device, torch.long, non_blocking=True)
        weights = weights.to(self.device, non_blocking=True)
        set_lr(self.optimizers, self.recipe.lr(self.step))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss, mtp_loss = self.model.losses(tokens, weights)
        (loss + self.recipe.mtp_weight * mtp_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        overload = torch.stack([gate.update_bias(self.recipe.bias_speed) for gate in self.model.gates()])
        self.step += 1
        self.tokens += tokens.numel()
        return {"loss": loss.detach(), "mtp_loss": mtp_loss.detach(), "grad_norm": norm, "overload": overload.max()}

    def state(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "tokens": self.tokens,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["recipe"] != asdict(self.recipe):
            raise ValueError("the state was written with another recipe")
        self.step, self.tokens = state["step"], state["tokens"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def train(trainer: Trainer, batches: Batches, probe: Probe, out: Path, seconds: float, workers: int) -> None:
    """Runs until the recipe's end or for about `seconds`, whichever is first."""
    state_file, started, logged = out / "state.pt", time.monotonic(), time.monotonic()
    with (out / "log.jsonl").open("a") as file:
        for tokens, weights in loader(batches, trainer.step, workers):
            values = trainer.train_step(tokens, weights)
            if trainer.step % LOG_EVERY == 0 or trainer.step == trainer.recipe.steps:
                line = {"step": trainer.step, "tokens": trainer.tokens, "lr": trainer.recipe.lr(trainer.step - 1)}
                line |= {name: round(value.item(), 4) for name, value in values.items()}
                now = time.monotonic()
                line["tokens_per_second"] = round(LOG_EVERY * tokens.numel() / (now - logged))
                if trainer.step % PROBE_EVERY == 0 or trainer.step == trainer.recipe.steps:
                    line |= probe(trainer.model)
                logged = time.monotonic()
                file.write(json.dumps(line) + "\n")
                file.flush()
                log.info("%s", line)
            if time.monotonic() - started > seconds:
                break
    torch.save(trainer.state(), state_file.with_suffix(".new"))
    state_file.with_suffix(".new").rename(state_file)
    log.info("state written step=%d of %d seconds=%.0f", trainer.step, trainer.recipe.steps, time.monotonic() - started)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Train the shipped model.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(ModelConfig(), Recipe(), "cuda" if torch.cuda.is_available() else "cpu")
    if (args.out / "state.pt").exists():
        trainer.restore(torch.load(args.out / "state.pt", map_location=trainer.device))
    batches = Batches(trainer.recipe, args.data, args.tokenizer / "tokenizer.json")
    train(trainer, batches, Probe(batches.chat, trainer.device), args.out, args.seconds, args.workers)
    if trainer.step == trainer.recipe.steps:
        checkpoint.save(trainer.model, args.out / "checkpoint")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.tokenizer / file, args.out / "checkpoint" / file)


if __name__ == "__main__":
    main()
