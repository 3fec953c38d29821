"""Systems without a server: our engine as a unified worker has it, and transformers as the reference. Import torch."""

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from millrace_cli.errors import CommandError
from millrace_common.config import load
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.engine.core import FinishReason, Load, Request, RequestId, SamplingParams, SequenceOutput, Submit
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.attn_step import FORMS
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.worker.config import WorkerConfig

from millrace_bench.data import TEXTS
from millrace_bench.eval.backend import Answer, Done, Job, Perplexity
from millrace_bench.eval.perplexity import checkpoint_logits, measure


class EngineBackend:
    """One engine with a unified worker's configuration.

    1. `answer` submits jobs until `concurrency` are live, and steps; a finished one makes room for the next.
       `complete` does so with texts instead of conversations.
    2. `close` stops the engine.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        concurrency: int,
        worker_set: Sequence[str] = (),
        keep_quantised: bool | None = None,
        form: str = "",
    ) -> None:
        """ValueError (ModelConfigError, CheckpointError) for a checkpoint that cannot be used.

        Args:
            keep_quantised: as load_model has it.
            form: of attention to cached prefixes, a key of FORMS; empty: the one that is faster.
        """
        own = ("role=unified", f"model={folder}", f"device={device}", *worker_set)
        self._config = load(WorkerConfig, overrides=own)
        self._folder, self._concurrency, self._keep_quantised = folder, concurrency, keep_quantised
        self._dtype = getattr(torch, self._config.dtype)
        self._tokenizer = Tokenizer.load(folder)
        at = folder, ParallelDims(), torch.device(device), self._dtype
        model = None
        if keep_quantised is not None or form:
            model = load_model(*at, FORMS.get(form), keep_quantised=keep_quantised)
        self._engine = load_rank(
            self._config.limits, self._config.role, *at, execution=self._config, model=model
        ).engine()
        self._rooms = 0

    async def answer(self, jobs: Sequence[Job], done: Done) -> list[Answer]:
        prompts = [await self._prompt(job) for job in jobs]
        return await asyncio.to_thread(self._run, jobs, prompts, done)

    async def complete(self, texts: Sequence[str], jobs: Sequence[Job]) -> list[Answer]:
        """What follows `texts`, sampled as each one's job says; messages of jobs are not used."""
        prompts = [await self._tokenizer.encode(text, add_bos=True) for text in texts]
        return await asyncio.to_thread(self._run, jobs, prompts, lambda: None)

    def load(self) -> Load:
        return self._engine.load()

    async def perplexity(self) -> Perplexity | None:
        encoded = [await self._tokenizer.encode(text, add_bos=True) for text in TEXTS]
        kv_dtype = None if self._config.kv_dtype == "auto" else getattr(torch, self._config.kv_dtype)
        at = self._folder, self._config.device, self._dtype
        logits = checkpoint_logits(*at, keep_quantised=self._keep_quantised, kv_dtype=kv_dtype)
        return await asyncio.to_thread(measure, TEXTS, encoded, logits)

    def close(self) -> None:
        self._engine.close()

    async def _prompt(self, job: Job) -> list[int]:
        """As the router does: the template writes the beginning-of-sequence token."""
        return await self._tokenizer.encode(
            self._tokenizer.render([message._asdict() for message in job.item.messages]), add_bos=False
        )

    def _run(self, jobs: Sequence[Job], prompts: list[list[int]], done: Done) -> list[Answer]:
        waiting = deque(range(len(jobs)))
        live: dict[RequestId, int] = {}
        said: list[list[SequenceOutput]] = [[] for _ in jobs]
        while waiting or live:
            while waiting and len(live) < self._concurrency:
                index = waiting.popleft()
                live[self._submit(jobs[index], prompts[index])] = index
            for output in self._engine.step().outputs:
                said[live[output.id]].append(output)
                if output.finish is not None:
                    del live[output.id]
                    done()
        return [self._answer(prompt, outputs) for prompt, outputs in zip(prompts, said, strict=True)]

    def _submit(self, job: Job, prompt: list[int]) -> RequestId:
        self._rooms += 1
        params = SamplingParams(max_tokens=job.item.max_tokens, temperature=job.temperature, seed=job.seed)
        request = Request(id=RequestId(self._rooms, 0), token_ids=prompt, sampling=params)
        self._engine.submit(Submit(request))
        return request.id

    def _answer(self, prompt: list[int], outputs: list[SequenceOutput]) -> Answer:
        last = outputs[-1]
        if last.finish is FinishReason.ERROR:
            return Answer(error=last.error.message if last.error else "unknown error")
        tokens = tuple(token.token_id for output in outputs for token in output.tokens)
        cached = max(output.found.cached_tokens for output in outputs)
        return Answer(self._tokenizer.decode(tokens), tokens, len(prompt), cached, len(tokens), len(outputs) - 1)


class TransformersBackend:
    """One prompt after the other through `generate`, with transformers' own tokenizer and chat template."""

    def __init__(self, folder: Path, device: str) -> None:
        """CommandError when transformers is not installed; OSError, ValueError for an unusable checkpoint."""
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer, logging
        except ImportError as error:
            raise CommandError(f"transformers is needed for the reference: {error}") from error
        logging.set_verbosity_error()  # it has no MTP layer, and would list those weights
        logging.disable_progress_bar()
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._device = device
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()

    async def answer(self, jobs: Sequence[Job], done: Done) -> list[Answer]:
        answers = []
        for job in jobs:
            answers.append(await asyncio.to_thread(self._one, job))
            done()
        return answers

    async def perplexity(self) -> Perplexity | None:
        bos = self._tokenizer.bos_token_id
        encoded = [[bos, *self._tokenizer.encode(text, add_special_tokens=False)] for text in TEXTS]
        return await asyncio.to_thread(measure, TEXTS, encoded, self._logits)

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([ids], device=self._device)).logits[0].float().cpu()

    def _one(self, job: Job) -> Answer:
        messages = [message._asdict() for message in job.item.messages]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        limit = self._model.config.max_position_embeddings - len(prompt)
        if limit < 1:
            return Answer(error=f"prompt has {len(prompt)} tokens, the model's context is {limit + len(prompt)}")
        ids = torch.tensor([prompt], device=self._device)
        sampling: dict[str, Any] = {"do_sample": False}
        if job.temperature > 0:
            torch.manual_seed(job.seed)
            sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(job.item.max_tokens, limit),
                pad_token_id=self._tokenizer.eos_token_id,
                **sampling,
            )
        tokens = tuple(output[0, len(prompt) :].tolist())
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(text, tokens, len(prompt), 0, len(tokens))
