"""The engine with a model of sparse attention: every way to the same prompt's tokens gives transformers' tokens.

A page is one block of latent rows and index keys, so a cached, moved or recomputed page must bring both.
"""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine.drafting import GREEDY, rank_of, run, tokens
from engine.harness import request
from millrace_serve.engine.config import Execution, Limits
from millrace_serve.engine.core import Request
from millrace_serve.engine.engine import Engine
from millrace_testing.sparse import INDEXER, write_sparse
from transformers import DeepseekV32ForCausalLM

OUTPUT = 24
LENGTHS = (44, 47, 50, 3, 80)  # index_topk lies among them


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse") / "model")


def engine(folder: Path, graphs: str = "off", **limits: object) -> Engine:
    wanted = {
        "num_pages": 120, "max_model_len": 256, "max_running": 9, "max_prefill_tokens": 70, "page_size": 16,
        "checks": ("canary", "poison"), **limits,
    }  # fmt: skip
    options = Execution.model_validate({"graphs": graphs})
    one = Limits.model_validate(wanted)
    return rank_of(one, options=options, path=folder).engine()


def requests(first: int = 0) -> list[Request]:
    prompts = [random.Random(length).choices(range(16, 1000), k=length) for length in LENGTHS]
    wants = {"max_tokens": OUTPUT, "ignore_eos": True, **GREEDY}
    return [request(first + room, prompt, **wants) for room, prompt in enumerate(prompts)]


@functools.cache
def reference(folder: Path) -> dict[int, list[int]]:
    hf = DeepseekV32ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert hf.config.index_topk == INDEXER["index_topk"] < max(LENGTHS)
    out = {}
    for each in requests():
        prompt = torch.tensor([each.token_ids])
        with torch.no_grad():
            found = hf.generate(prompt, max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=2)
        out[each.id.room] = found[0, prompt.shape[1] :].tolist()
    return out


@pytest.fixture
def expected(folder: Path) -> Iterator[dict[int, list[int]]]:
    found = reference(folder)
    assert len({token for each in found.values() for token in each}) > 20, "worth comparing"
    return found


@pytest.mark.parametrize(("drafts", "graphs"), [(0, "off"), (2, "on")])
def test_tokens_are_those_of_transformers(
    folder: Path, expected: dict[int, list[int]], drafts: int, graphs: str
) -> None:
    one = engine(folder, graphs, draft_tokens=drafts, draft_batches=(9,) * drafts)
    assert tokens(run(one, requests())) == expected


def test_cached_prompts_bring_their_index_keys(folder: Path, expected: dict[int, list[int]]) -> None:
    one = engine(folder)
    for turn in range(2):
        said = run(one, requests(first=100 * turn), close=turn > 0)
        assert list(tokens(said).values()) == list(expected.values())
        cached = [outputs[0].found.cached_tokens for outputs in said.values()]
        assert cached == [turn * ((length - 1) // 16 * 16) for length in LENGTHS]


@pytest.mark.parametrize("host_cache", [False, True])
def test_preempted_prompts_choose_again(folder: Path, expected: dict[int, list[int]], host_cache: bool) -> None:
    """Recomputed, or brought back from the host's memory."""
    tight = engine(folder, num_pages=14, host_cache_gib=0.01 * host_cache)  # each has 5 in the end
    found = tokens(run(tight, requests()[:3], close=False))
    assert found == {room: expected[room] for room in found}
    load = tight.load()
    assert load.counters["preemptions"] > 0 and (load.counters.get("host_bytes/load", 0) > 0) == host_cache
    tight.close()
