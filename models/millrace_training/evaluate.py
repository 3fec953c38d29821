"""Measures an exported checkpoint, greedy, and writes the numbers that the model card shows.

    python -m millrace_training.evaluate CHECKPOINT_DIR --heldout DATA_DIR/heldout.npz --out results.json

Greedy generation recomputes the whole sequence for every token: no cache that could be wrong, fast enough at this size.
"""

import argparse
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from millrace_bench.tasks import TASKS, Item, Match, Task, Turn, Verdict, judge, wilson_interval
from tokenizers import Tokenizer
from torch import Tensor

from millrace_training import checkpoint
from millrace_training.batches import ChatEncoder, TextTokens
from millrace_training.config import BOS_ID, EOS_ID, PAD_ID
from millrace_training.model import DeepseekV3

SEED = 0
ITEMS = 500
ITEMS_OF = {"chat": 300}  # it has fewer than 500 held-out items
TEXT_PROMPTS, TEXT_PROMPT_TOKENS, TEXT_TOKENS = 200, 64, 128
PERPLEXITY_ROW = 1024
BATCH_TOKENS = 1 << 18
TARGETS = {
    "retrieval_1k": 0.95,
    "retrieval_2k": 0.95,
    "retrieval_4k": 0.95,
    "addition": 0.95,
    "copy": 0.99,
    "mtp": 0.70,
}

log = logging.getLogger(__name__)


class Evaluator:
    def __init__(self, directory: Path, device: str) -> None:
        self.model = checkpoint.load(directory, device)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.chat = ChatEncoder(self.tokenizer)
        self.device = device

    def task(self, task: Task, count: int) -> dict[str, Any]:
        items = task.items(SEED, count)
        prompts = [self.prompt(item) for item in items]
        outputs = greedy(self.model, prompts, task.max_tokens, self.device)
        verdicts = [judge(i, self.tokenizer.decode(o)) for i, o in zip(items, outputs, strict=True)]
        correct = verdicts.count(Verdict.CORRECT)
        low, high = wilson_interval(correct, count)
        numbers: dict[str, Any] = {"items": count, "correct": correct, "invalid": verdicts.count(Verdict.INVALID)}
        numbers |= {"accuracy": correct / count, "low": round(low, 4), "high": round(high, 4)}
        numbers["prompt_tokens"] = max(map(len, prompts))
        wrong = [(i, o) for i, o, v in zip(items, outputs, verdicts, strict=True) if v is not Verdict.CORRECT]
        for item, output in wrong[:3]:
            log.info("%s wrong: %r instead of %r", task.name, self.tokenizer.decode(output), item.answer)
        return numbers | self.acceptance(prompts, outputs)

    def prompt(self, item: Item) -> list[int]:
        texts = [message.content for message in item.messages] + [""]
        tokens, _ = self.chat([Turn(*pair) for pair in zip(texts[::2], texts[1::2], strict=True)])
        return tokens[:-1]  # without the empty answer's end token

    def text(self, heldout: TextTokens) -> dict[str, Any]:
        """Perplexity of the held-out pages; MTP's acceptance on, and samples of, their greedy continuations."""
        rows = _rows(heldout)
        nats = sum(self._nats(row) for row in rows)
        targets = sum(len(row) - 1 for row in rows)
        text_bytes = sum(len(self.tokenizer.decode(row).encode()) for row in rows)
        step = max(1, len(rows) // TEXT_PROMPTS)
        prompts = [row[:TEXT_PROMPT_TOKENS] for row in rows[::step]][:TEXT_PROMPTS]
        outputs = greedy(self.model, prompts, TEXT_TOKENS, self.device)
        samples = [
            {"prompt": self.tokenizer.decode(p), "continuation": self.tokenizer.decode(o)}
            for p, o in list(zip(prompts, outputs, strict=True))[:4]
        ]
        numbers = {
            "tokens": targets,
            "perplexity": math.exp(nats / targets),
            "bits_per_byte": nats / math.log(2) / text_bytes,
        }
        return numbers | {"prompts": len(prompts), **self.acceptance(prompts, outputs), "samples": samples}

    @torch.no_grad()
    def _nats(self, row: list[int]) -> float:
        tokens = torch.tensor([row], device=self.device)
        logits = self.model.lm_head(self.model.hidden(tokens[:, :-1])).float()
        return F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()

    @torch.no_grad()
    def acceptance(self, prompts: list[list[int]], outputs: list[list[int]]) -> dict[str, Any]:
        """How often MTP's draft is the token that the main model then chooses: a draft for each token but the first."""
        accepted = drafted = 0
        for batch in _batches([p + o for p, o in zip(prompts, outputs, strict=True)]):
            tokens, _ = _padded([p for _, p in batch], self.device)
            drafts = self.model.lm_head(
                self.model.mtp_hidden(tokens[:, 1:-1], self.model.hidden(tokens[:, :-2]))
            ).argmax(-1)
            right = (drafts == tokens[:, 2:]).cpu()
            for row, (index, sequence) in zip(right, batch, strict=True):
                judged = row[len(prompts[index]) - 1 : len(sequence) - 2]  # drafts[i] is for position i + 2
                accepted, drafted = accepted + int(judged.sum()), drafted + len(judged)
        low, high = wilson_interval(accepted, drafted)
        rate = accepted / drafted if drafted else 0.0
        return {
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": rate,
            "acceptance_ci": [round(low, 4), round(high, 4)],
        }


@torch.no_grad()
def greedy(model: DeepseekV3, prompts: list[list[int]], max_tokens: int, device: str) -> list[list[int]]:
    """The likeliest tokens after each prompt, up to and including the end token."""
    limit = model.config.max_position_embeddings
    outputs: list[list[int]] = [[] for _ in prompts]
    for batch in _batches(prompts):
        running = [index for index, _ in batch]
        while running:
            tokens, lengths = _padded([prompts[i] + outputs[i] for i in running], device)
            hidden = model.hidden(tokens)[torch.arange(len(running), device=device), lengths - 1]
            for i, token in zip(running, model.lm_head(hidden).argmax(-1).tolist(), strict=True):
                outputs[i].append(token)
            running = [
                i
                for i in running
                if outputs[i][-1] != EOS_ID
                and len(outputs[i]) < max_tokens
                and len(prompts[i]) + len(outputs[i]) < limit
            ]
    return outputs


def _batches(sequences: list[list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
    """(index, sequence) in batches of similar lengths."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    while order:
        rows = max(1, BATCH_TOKENS // len(sequences[order[-1]]))
        yield [(i, sequences[i]) for i in order[-rows:]]
        del order[-rows:]


def _padded(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [N, T] and lengths [N]; causal attention never sees the padding."""
    length = max(map(len, rows))
    tokens = torch.tensor([row + [PAD_ID] * (length - len(row)) for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], device=device)


def _rows(text: TextTokens) -> list[list[int]]:
    size = PERPLEXITY_ROW - 1
    starts = range(0, len(text.tokens) - size, size)
    return [[BOS_ID, *text.tokens[start : start + size].tolist()] for start in starts]


def evaluate(directory: Path, heldout: Path, device: str, items: int = ITEMS) -> dict[str, Any]:
    evaluator = Evaluator(directory, device)
    results: dict[str, Any] = {"tasks": {}}
    for name, task in TASKS.items():
        results["tasks"][name] = evaluator.task(task, min(items, ITEMS_OF.get(name, items)))
        log.info("%s %s", name, results["tasks"][name])
    results["text"] = evaluator.text(TextTokens(heldout))
    parts = [*results["tasks"].values(), results["text"]]
    accepted, drafted = sum(part["accepted"] for part in parts), sum(part["drafted"] for part in parts)
    low, high = wilson_interval(accepted, drafted)
    results["mtp"] = {
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted,
        "low": low,
        "high": high,
    }
    return results


def table(results: dict[str, Any]) -> str:
    """The model card's table."""
    lines = ["| task | items | accuracy | 95 % interval | target | MTP acceptance |", "|---|---|---|---|---|---|"]
    for name, r in results["tasks"].items():
        target = f"{TARGETS[name]:.2f}" if name in TARGETS else "-"
        interval = f"{r['low']:.3f}-{r['high']:.3f}"
        match = "number" if TASKS[name].match is Match.NUMBER else "exact"
        cells = (f"{name} ({match})", r["items"], f"{r['accuracy']:.3f}", interval, target, f"{r['acceptance']:.3f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    text, mtp = results["text"], results["mtp"]
    lines.append(f"| text continuation | {text['prompts']} | - | - | - | {text['acceptance']:.3f} |")
    lines.append(f"| all of the above | - | - | - | {TARGETS['mtp']:.2f} (MTP) | {mtp['acceptance']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description="Evaluate an exported checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=ITEMS)
    args = parser.parse_args()
    results = evaluate(args.checkpoint, args.heldout, "cuda" if torch.cuda.is_available() else "cpu", args.items)
    args.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    log.info("%s", table(results))


if __name__ == "__main__":
    main()
