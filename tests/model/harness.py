"""Drives a model the way an engine does, with everything that it must not read poisoned.

The pool is NaN but for the null page, page ids are dealt in shuffled order, and freed pages are poisoned again.
"""

import random
from dataclasses import dataclass, field, replace

import torch
from millrace_bench.pools import PAGE, model_pool
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from torch import Tensor


@dataclass
class Seq:
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0


class Driver:
    def __init__(
        self, model: DeepseekV3, num_pages: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        config = model.config
        self.model = model
        self.pool = model_pool(config, num_pages, dtype, "cpu")
        self.kv = self.pool.view()
        self.pool.scrub(range(1, num_pages))
        self.free = list(range(1, num_pages))
        random.Random(seed).shuffle(self.free)

    def release(self, seq: Seq) -> None:
        self.pool.scrub(seq.pages)
        self.free += seq.pages
        seq.pages = []

    def build(self, work: list[tuple[Seq, int]], padding: int = 0, dp_num_tokens: tuple[int, ...] = ()) -> ForwardInput:
        """`work`: (sequence, new tokens); a sequence decodes when it gets one token after computed ones."""
        work = sorted(work, key=lambda item: not _decodes(*item))
        tokens, positions, slots, rows = [], [], [], []
        for seq, num in work:
            while len(seq.pages) * PAGE < seq.computed + num:
                seq.pages.append(self.free.pop())
            span = range(seq.computed, seq.computed + num)
            tokens += [seq.tokens[i] for i in span]
            positions += span
            slots += [seq.pages[i // PAGE] * PAGE + i % PAGE for i in span]
            rows.append(len(tokens) - 1)
        q_lens = [num for _, num in work]
        seq_lens = [seq.computed + num for seq, num in work]
        width = max((len(seq.pages) for seq, _ in work), default=1)
        table = torch.tensor([seq.pages + [0] * (width - len(seq.pages)) for seq, _ in work], dtype=torch.int32)
        plan = AttnPlan(
            num_decode=sum(_decodes(*item) for item in work),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            page_table=table.view(len(work), -1) if work else torch.zeros(0, 1, dtype=torch.int32),
            q_lens_host=tuple(q_lens),
            seq_lens_host=tuple(seq_lens),
        )
        pad = [0] * padding
        return ForwardInput(
            token_ids=torch.tensor(tokens + pad, dtype=torch.int64),
            positions=torch.tensor(positions + pad, dtype=torch.int64),
            kv_slots=torch.tensor(slots + [i % PAGE for i in range(padding)], dtype=torch.int64),
            attn=plan,
            sample_rows=torch.tensor(rows, dtype=torch.int64),
            dp_num_tokens=dp_num_tokens,
            num_tokens=torch.tensor([len(tokens)], dtype=torch.int32) if padding else None,
        )

    def step(self, work: list[tuple[Seq, int]], padding: int = 0, dp_num_tokens: tuple[int, ...] = ()) -> Tensor:
        """Runs one step and returns the logits [T, vocab] of all real rows, in the order of `work` sorted by phase."""
        inputs = self.build(work, padding, dp_num_tokens)
        num_tokens = len(inputs.token_ids) - padding
        inputs = replace(inputs, sample_rows=torch.arange(num_tokens))
        hidden = self.model.forward(inputs, self.kv)
        for seq, num in work:
            seq.computed += num
        return self.model.logits(hidden[:num_tokens])

    def greedy(self, prompts: list[list[int]], num_tokens: int, chunk: int = 1 << 30) -> list[list[int]]:
        """Continuous batching: prompts in chunks beside decoding sequences, all until `num_tokens` are generated."""
        seqs = [Seq(list(prompt)) for prompt in prompts]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        while True:
            work = [(seq, min(chunk, len(seq.tokens) - seq.computed)) for seq in seqs if seq.computed < len(seq.tokens)]
            if not work:
                break
            work.sort(key=lambda item: not _decodes(*item))
            logits = self.step(work)
            row = -1
            for seq, num in work:
                row += num
                end = ends[next(i for i, s in enumerate(seqs) if s is seq)]
                if seq.computed == len(seq.tokens) and len(seq.tokens) < end:
                    seq.tokens.append(int(logits[row].argmax()))
        for seq in seqs:
            self.release(seq)
        return [seq.tokens[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]


def _decodes(seq: Seq, num: int) -> bool:
    return num == 1 and seq.computed > 0


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)
