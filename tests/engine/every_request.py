"""Requests of every kind, what of the engine they reach, and a cold start that serves them (`python -m`): by itself in
a process, so that no cache of another start is there.
"""

import contextlib
import faulthandler
import itertools
import json
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine.harness import request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Grammar, GrammarKind, Request, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.compilations import Compilations
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.model.attn_step import FormThresholds
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.worker.caches import FOLDERS, sizes
from millrace_testing.launches import Variant, differences

LIMIT_S = 1200  # of a start and all requests; then the stacks of all threads are on stderr, and the process ends
SLOWEST = 5  # steps that are told
Slow = list[tuple[float, list[str]]]  # seconds of a step, and which steps were under way
JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}')
TAG = Grammar(GrammarKind.LARK, 'start: "<a>" %json {"type": "integer"} "</a>"')
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "seed": 1 << 63},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "top_k": 1100},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.01, "seed": 7},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "temperature": 0.9},
    {"frequency_penalty": -0.5},
    {"logit_bias": {20: 5.0, 33: -100.0}},
    {"min_tokens": 6, "stop_token_ids": (50, 51)},
    {"min_tokens": 3, "ignore_eos": False},
    {"logprobs": 0},
    {"logprobs": 1, "temperature": 0.8},
    {"logprobs": 20},
    {"grammar": Grammar(GrammarKind.REGEX, "(yes|no): [0-9]{2,4}"), "ignore_eos": False},
    {"grammar": JSON, "ignore_eos": False, "temperature": 0.8, "top_p": 0.9},
    {"grammar": TAG, "ignore_eos": False, "repetition_penalty": 1.1},
    {"grammar": Grammar(GrammarKind.REGEX, "[a-z]+", after_token_id=4), "ignore_eos": False},
    {
        "grammar": JSON, "ignore_eos": False, "temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.02,
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {40: 1.0},
        "logprobs": 5, "seed": 11,
    },
]  # fmt: skip
BRANCHES = {
    "greedy", "drawn", "filters", "penalties", "bias", "grammar", "logprobs", "cached prefix",
    "prefix absorbed", "prefix expanded", "several chunks behind a prefix", "chunks of several lengths",
    "chunks beside decoding", "part of a prompt",
}  # fmt: skip


def groups(most: int, longest: int) -> Iterator[list[Request]]:
    """Requests that come at once, group by group.

    Args:
        most: limits.max_prefill_tokens; longest: limits.max_model_len
    """
    rooms = iter(range(1 << 20))

    def ask(length: int, start: int = 7, max_tokens: int = 3, **sampling: Any) -> Request:
        """Prompts with equal starts have equal beginnings."""
        prompt = [10 + (start * (i + 1) + i // 5) % 500 for i in range(length)]
        return request(next(rooms), prompt, max_tokens=max_tokens, **sampling)

    lengths = [1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 127, 130, most // 2 + 1, most - 1, most, most + 1, longest - 40]
    lengths = sorted({length for length in lengths if length < longest - 20})
    for length in lengths:  # new prompts, then again
        yield [ask(length, length)]
        yield [ask(length, length)]
    for length in (66, 81, 128 + 3, 64 + most // 3, 64 + most, longest - 30):  # ends behind cached beginnings
        yield [ask(65, 300 + length)]
        yield [ask(length, 300 + length), ask(min(length + 7, longest - 25), 300 + length)]
    for count in (2, 3, 5, 8):
        yield [ask(65 + 16 * i, 7) for i in range(count)]
        yield [ask(9 + i, 100 + i, max_tokens=9 + i) for i in range(count)]
    yield [ask(64 + most - 20, 300 + 131), ask(12, 999)]  # the long one decides about the form
    for sampling in SAMPLINGS:
        yield [ask(70, 11, max_tokens=6, **sampling)]
    yield [ask(40 + i, 200 + i, max_tokens=6 + i, **sampling) for i, sampling in enumerate(SAMPLINGS)]


def serve(engine: Engine, limits: Limits, launched: deque[str] | None = None) -> tuple[Counter[str], Slow]:
    """Answers every group by itself, then the requests of every second group as they come, one before each step.
    Returns what they reached, and the slowest steps. The engine is closed.

    Args:
        launched: the last steps are there, as `watched` puts them
    """
    launched = deque(maxlen=2) if launched is None else launched
    seen, slowest = watched(engine, launched), Slow()

    def step() -> None:
        began = time.monotonic()
        check_step(engine, seen)
        slowest.append((time.monotonic() - began, list(launched)))
        slowest.sort(reverse=True)
        del slowest[SLOWEST:]

    everything = list(groups(limits.max_prefill_tokens, limits.max_model_len))
    for group in everything:
        submit(engine, group)
        while engine.has_work():
            step()
    for one in itertools.chain(*everything[::2]):
        submit(engine, [one])
        step()
    while engine.has_work():
        step()
    engine.close()
    return seen, slowest


def serve_as_replica(engine: Engine, limits: Limits, replica: int, over: Callable[[], bool]) -> Counter[str]:
    """All replicas call it. Each answers all groups one after the other, the second one in reverse and later: they step
    beside replicas that have nothing, prompts or decoding sequences. Returns what they reached; the engine is closed.

    Args:
        over: notes that this replica has answered everything; whether all have. The first that ends ends all others.
    """
    seen, step, answered = watched(engine), 0, 0
    everything = list(groups(limits.max_prefill_tokens, limits.max_model_len))
    waiting = everything[:: -1 if replica else 1]
    while not engine.stopped:
        if step >= 50 * replica and not engine.has_work():
            if waiting:
                submit(engine, waiting.pop())
            elif over():
                engine.stop()
        answered += check_step(engine, seen)
        step += 1
    engine.close()
    assert answered == sum(map(len, everything)), "the engine ended before it had answered everything"
    return seen


def submit(engine: Engine, requests: Sequence[Request]) -> None:
    """Returns when their grammars are compiled: how long that takes decides about no step."""
    for one in requests:
        engine.submit(Submit(one))
    wait([held.job.compiled for held in engine._grammars._held.values()])


def check_step(engine: Engine, seen: Counter[str]) -> int:
    """How many requests ended in it."""
    outputs = engine.step().outputs
    for output in outputs:
        assert output.error is None, output.error
        seen["cached prefix"] += output.found.cached_tokens > 0
        seen["drafts"] += output.num_drafted > 0
    return sum(output.finish is not None for output in outputs)


def check_reached(seen: dict[str, int], drafts: int, *others: str) -> None:
    """They reached everything that an engine with graphs has."""
    assert not (wrong := not_as_wanted(seen, drafts, *others)), (wrong, seen)


def not_as_wanted(seen: dict[str, int], drafts: int, *others: str) -> set[str]:
    """What they did not reach, and what there should not be."""
    wanted = {*BRANCHES, *others, "graphs", *(["drafts"] if drafts else [])}
    return wanted ^ {name for name, count in seen.items() if count}


def watched(engine: Engine, launched: deque[str] | None = None) -> Counter[str]:
    """Counts what the steps of this engine are, from now on. `launched` gets each step in words."""
    runner: Any = engine._runner
    seen = Counter[str]()
    thresholds = FormThresholds.measured(engine.pool.buffer.device, runner._model.config.num_attention_heads)
    launch = runner.launch

    def counting(batch: HostBatch) -> Any:
        seen.update(_branches(batch, thresholds))
        graph = runner._graphs is not None and runner._graphs.holds(batch)
        seen["graphs"] += graph
        if launched is not None:
            sampled = "greedy" if batch.sampling is None else "sampled"
            rows = f"{batch.num_decode} x {batch.num_queries} rows, chunks {batch.chunk_lens} up to {batch.chunk_ends}"
            launched.append(f"{rows}, {sampled}{', a graph' if graph else ''}")
        return launch(batch)

    runner.launch = counting
    return seen


def _branches(batch: HostBatch, thresholds: FormThresholds) -> Iterator[str]:
    lens, ends, sampling = batch.chunk_lens, batch.chunk_ends, batch.sampling
    cached = sum(end > size for size, end in zip(lens, ends, strict=True))
    facts: dict[str, Any] = {
        "chunks beside decoding": lens and batch.num_decode,
        "prefix absorbed": cached and thresholds.absorbs(lens, ends),
        "prefix expanded": cached and not thresholds.absorbs(lens, ends),
        "several chunks behind a prefix": cached > 1,
        "chunks of several lengths": len(set(lens)) > 1,
        "part of a prompt": len(batch.sampling_chunks) < len(lens),
        "shared chunk": batch.shared is not None,
        "no row": not batch.num_rows[0],
        "greedy": sampling is None,
    }
    if sampling is not None:
        drawn = sampling.drawn
        filters = (sampling.top_k[drawn] > 0) | (sampling.top_p[drawn] < 1) | (sampling.min_p[drawn] > 0)
        facts |= {
            "drawn": len(drawn),
            "filters": bool(filters.any()),
            "penalties": sampling.penalties is not None,
            "bias": sampling.bias is not None,
            "grammar": sampling.grammar is not None,
            "logprobs": sampling.num_logprobs >= 0,
        }
    return (name for name, holds in facts.items() if holds)


class TritonVariants:
    """The variants of kernels that Triton's listener has told of, compiled or from the cache folder."""

    def __init__(self) -> None:
        self.known: set[Variant] = set()
        self.late: list[tuple[str, list[str]]] = []  # how each differs from the nearest one known, and what ran
        self.started = False

    def add(self, src: Any, metadata: Any, cache_hit: bool, launched: deque[str]) -> None:
        """Args: as Triton's listener has them; launched: the last steps."""
        names = src.fn.arg_names
        kinds = [(name, src.constants.get((i,), src.signature.get(name))) for i, name in enumerate(names)]
        kinds += [(f"{name} is", src.attrs.get((i,))) for i, name in enumerate(names)]
        kinds += [(option, metadata.get(option)) for option in ("num_warps", "num_stages", "maxnreg")]
        variant = src.name, tuple((name, str(kind)) for name, kind in kinds)
        if self.started and not cache_hit:
            self.late += [(text, list(launched)) for text in differences(self.known, {variant})]
        self.known.add(variant)

    @contextlib.contextmanager
    def listening(self, launched: deque[str]) -> Iterator[None]:
        counting = Compilations.on_triton

        def both(compilations: Compilations, *, src: Any, metadata: Any, cache_hit: bool, **facts: Any) -> None:
            self.add(src, metadata, cache_hit, launched)
            counting(compilations, src=src, cache_hit=cache_hit, **facts)

        with mock.patch.object(Compilations, "on_triton", both):
            yield


def main() -> None:
    """A start on the GPU with the caches of this process's environment, and all requests; prints what was found, also
    when it fails.
    """
    model, cache_dir, dtype, kv_dtype, drafts = sys.argv[1:]
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    found: dict[str, Any] = {"had": sizes(Path(cache_dir))}
    limits = Limits(
        num_pages=1024, max_model_len=4096, max_running=8, max_prefill_tokens=2048, draft_tokens=int(drafts),
        draft_batches=(8, 4, 2),
    )  # fmt: skip
    execution = Execution.model_validate({"memory_fraction": 0.5, "kv_dtype": kv_dtype, "cache_dir": cache_dir})
    device, began = torch.device("cuda", torch.cuda.current_device()), time.monotonic()
    variants, launched = TritonVariants(), deque[str](maxlen=2)
    try:
        with variants.listening(launched):
            rank = load_rank(
                limits, Role.UNIFIED, Path(model), ParallelDims(), device, getattr(torch, dtype), execution=execution
            )
        found |= {"start_s": time.monotonic() - began, "has": sizes(Path(cache_dir))}
        found["before"], before = dict(rank.lockstep.progress.compiled()), _entries(Path(cache_dir))
        variants.started = True
        found["seen"], found["slowest"] = serve(rank.engine(), limits, launched)
        found["after"] = dict(rank.lockstep.progress.compiled())
        found["new"] = sorted(_entries(Path(cache_dir)) - before)
    except BaseException:
        found |= {"error": traceback.format_exc(), "launched": list(launched)}
        raise
    finally:
        found["late"] = variants.late
        sys.stdout.write(json.dumps(found))
        sys.stdout.flush()


def _entries(cache_dir: Path) -> set[str]:
    """The files of a cache folder; those of DeepGEMM name the kernel."""
    folders = [cache_dir / name for name in FOLDERS]
    return {str(path.relative_to(cache_dir)) for folder in folders for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main()
