"""Acceptance of drafts by exact match with shared noise, against the limit that rejection sampling would reach.

python -m millrace_bench.drafts_limit [--model models/tiny] [--num-items 10] [--temperature 1]

Held-out texts are continued by sampling. Then main model and MTP layer run once over each text and its continuation,
so at every output position both distributions are known:

    exact match   part of positions at which both, with the same Gumbel noise, choose the same token: the rule in use
    rejection     1 - TV, the mean over positions of the sum of min(p, q): what rejection sampling would accept
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

import torch
from millrace_cli.cluster import TINY
from millrace_kernels.sample_tokens import gumbel_noise
from millrace_load.record import Record, print_record
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

from millrace_bench.drafts import works
from millrace_bench.eval.in_process import EngineBackend
from millrace_bench.pools import PAGE, model_pool

Continued = tuple[int, list[int], list[int]]  # seed, prompt, continuation


async def continued(folder: Path, num_items: int, temperature: float, tokens: int) -> list[Continued]:
    """Texts as token ids, continued by an engine without drafts."""
    own = ("limits.draft_tokens=0", "dtype=float32")
    with contextlib.closing(EngineBackend(folder, "cpu", 4, own)) as backend:
        (work,) = works((), num_items, (temperature,), tokens)
        prompts = [await backend._tokenizer.encode(text, add_bos=True) for text in work.prompts]
        answers = await backend.complete(work.prompts, work.jobs)
    said = [list(answer.token_ids) for answer in answers]
    return [(job.seed, prompt, output) for job, prompt, output in zip(work.jobs, prompts, said, strict=True)]


def logits(model: DeepseekV3, tokens: list[int], first: int) -> tuple[Tensor, Tensor]:
    """Of the main model and of the MTP layer for the tokens from index `first` (>= 2) on: each float32 [N, V]."""
    count = len(tokens) - 1
    ids, positions, pages = torch.tensor(tokens), torch.arange(count), -(-count // PAGE)
    length = torch.tensor([count], dtype=torch.int32)
    attn = AttnPlan(0, length, torch.arange(1, 1 + pages, dtype=torch.int32)[None], (count,), (count,))
    kv = model_pool(model.config, 1 + pages, torch.float32, "cpu").view()
    hidden = model.forward(ForwardInput(ids[:-1], positions, positions + PAGE, attn, positions), kv)
    drafted = model.forward_mtp(ForwardInput(ids[1:], positions, positions + PAGE, attn, positions), hidden, kv)
    return model.logits(hidden[first - 1 :]), model.logits(drafted[first - 2 : -1])


def compare(model: DeepseekV3, text: Continued, temperature: float) -> tuple[Tensor, Tensor]:
    """Whether each token but the first would be accepted by exact match, and the probability by rejection sampling."""
    seed, prompt, output = text
    target, draft = (part / temperature for part in logits(model, prompt + output, len(prompt) + 1))
    index = torch.arange(1, len(output))
    noise = gumbel_noise(torch.full_like(index, seed), index, target.shape[-1])
    same = (target + noise).argmax(-1) == (draft + noise).argmax(-1)
    return same, torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance of drafts against rejection sampling.")
    parser.add_argument("--model", type=Path, default=TINY, help="checkpoint folder (%(default)s)")
    parser.add_argument("--num-items", type=int, default=10, help="texts at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=64, help="of a continuation (%(default)s)")
    args = parser.parse_args()
    texts = asyncio.run(continued(args.model, args.num_items, args.temperature, args.tokens))
    model = load_model(args.model, ParallelDims(), torch.device("cpu"), torch.float32)
    both = [compare(model, text, args.temperature) for text in texts]
    same, rejection = (torch.cat([pair[place] for pair in both]).float() for place in (0, 1))
    print_record(
        Record(
            "drafts-limit",
            vars(args),
            {
                "positions": len(same),
                "exact_match": round(same.mean().item(), 4),
                "rejection": round(rejection.mean().item(), 4),
            },
        )
    )


if __name__ == "__main__":
    main()
