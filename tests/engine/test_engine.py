"""Whole engines: simulated without torch, real against transformers, and one handing its pages to another."""

import random
import subprocess
import sys

import pytest
import torch
from engine.drafting import rank_of
from engine.harness import Driver, request
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import (
    FinishReason,
    FlushCache,
    KvArrived,
    KvChunk,
    KvOffered,
    LeaseEnded,
    Request,
    RequestId,
    Route,
    SamplingParams,
    SequenceOutput,
    Submit,
)
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.sim.factory import sim_layout
from millrace_serve.engine.sim.runner import SimRunner, SimSettings
from millrace_serve.engine.step.batch import StepBatch
from millrace_testing.reference import Continuation, assert_same, greedy, load

LENGTHS = (1, 2, 63, 64, 65, 129, 200)
GREEDY = {"temperature": 0.0, "logprobs": 0}
SEEDED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 11,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(16, 1000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> list[Continuation]:
    return greedy(prompts, 8)


def make(role: Role, **config: object) -> Engine:
    base = {"num_pages": 64, "max_model_len": 512, "max_running": 16, "max_prefill_tokens": 96}
    debug = {"checks": ("canary", "poison")}
    config_ = EngineConfig.model_validate({**base, **debug, **config})
    return rank_of(config_, role).engine()


def requests(prompts: list[list[int]], route: Route = Route.LOCAL, start: int = 0, **sampling: object) -> list[Request]:
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return [
        Request(id=RequestId(start + room, 0), token_ids=prompt, sampling=params, route=route)
        for room, prompt in enumerate(prompts)
    ]


def collect(engine: Engine, batch: list[Request]) -> list[SequenceOutput]:
    """Submit, run to the end; all outputs in order."""
    for one in batch:
        engine.submit(Submit(one))
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    engine.check_idle()
    return outputs


def said(outputs: list[SequenceOutput], batch: list[Request]) -> list[Continuation]:
    assert not any(output.error for output in outputs), [output.error for output in outputs if output.error]
    answers = [[token for output in outputs if output.id == one.id for token in output.tokens] for one in batch]
    return [Continuation([one.token_id for one in answer], [one.logprob for one in answer]) for answer in answers]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap": False, "max_prefill_tokens": 2048, "checks": ()},
        {"num_pages": 18, "prefix_cache": False},  # not all fit at once
    ],
    ids=["chunked-overlap", "synchronous-one-chunk", "small-pool"],
)
def test_greedy_is_transformers_generate(prompts, reference, config):
    engine = make(Role.UNIFIED, **config)
    first = requests(prompts, **GREEDY)
    assert_same(said(collect(engine, first), first), reference)
    again = requests(prompts, start=100, **GREEDY)
    outputs = collect(engine, again)
    assert_same(said(outputs, again), reference)
    cached = {output.id.room - 100: output.found.cached_tokens for output in outputs if output.first_index == 0}
    if engine.config.prefix_cache:
        assert [cached[room] for room in range(len(LENGTHS))] == [(n - 1) // 64 * 64 for n in LENGTHS]
    else:
        assert not any(cached.values())
    engine.close()


def hand_over(source: Engine, sink: Engine, batch: list[Request]) -> list[SequenceOutput]:
    """EXPORT on `source`, copy the pages, IMPORT on `sink`; everything that a client would see, in order."""
    exports = [Request(**{**fields(one), "route": Route.EXPORT}) for one in batch]
    imports = {one.id: Request(**{**fields(one), "route": Route.IMPORT}) for one in batch}
    parts: dict[RequestId, list[KvChunk]] = {one.id: [] for one in batch}
    seen: list[SequenceOutput] = []
    for one in exports:
        source.submit(Submit(one))
    while source.has_work():
        events = source.step()
        seen += events.outputs
        for part in events.chunks:
            parts[part.id].append(part)
    for id, one in imports.items():
        sink.submit(Submit(one))
        sink.submit(KvOffered(id))
    while sink.has_work():
        events = sink.step()
        seen += events.outputs
        for reserved in events.reserved:
            pages = [page for part in parts[reserved.id] for page in part.page_ids]
            assert len(pages) == len(reserved.page_ids)
            first = reserved.num_cached_pages
            rows = source.pool.buffer.view(source.pool.num_pages, -1)[pages[first:]]
            sink.pool.buffer.view(sink.pool.num_pages, -1)[reserved.page_ids[first:]] = rows
            source.submit(LeaseEnded(reserved.id))
            sink.submit(KvArrived(reserved.id, parts[reserved.id][-1].first))
    while source.has_work():
        source.step()
    return seen


def fields(one: Request) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


@pytest.mark.parametrize(("sampling", "overlap"), [(GREEDY, False), (SEEDED, True)], ids=["greedy", "seeded-overlap"])
def test_prefill_to_decode_is_local(prompts, sampling, overlap):
    local = make(Role.UNIFIED, overlap=overlap)
    source = make(Role.PREFILL, overlap=overlap)
    sink = make(Role.DECODE, overlap=overlap)
    batch = requests(prompts, **sampling)
    expected = said(collect(local, batch), batch)
    for turn in range(2):  # the second time from both prefix caches
        ids = requests(prompts, start=100 * turn, **sampling)
        outputs = hand_over(source, sink, ids)
        assert_same(said(outputs, ids), expected)
        assert sum(output.finish is FinishReason.LENGTH for output in outputs) == len(ids)
    for engine in (source, sink, local):
        engine.submit(FlushCache())
        engine.check_idle()
        assert engine.load().pages_free == engine.load().pages_total
        engine.close()


def test_seeded_sampling_does_not_depend_on_company_or_replay(prompts):
    engine = make(Role.UNIFIED)
    batch = requests(prompts, **SEEDED)
    together = said(collect(engine, batch), batch)
    for one, expected in zip(batch[::3], together[::3], strict=True):
        replay = Request(
            id=RequestId(one.id.room, 1),
            token_ids=one.token_ids + expected.tokens[:5],
            sampling=one.sampling,
            num_prior_outputs=5,
        )
        outputs = collect(engine, [replay])
        assert_same(said(outputs, [replay]), [Continuation(expected.tokens[5:], expected.logprobs[5:])])
        assert outputs[0].first_index == 5 and len(outputs[0].tokens[0].top) == 2
    engine.close()


def test_logprobs_are_those_of_the_model(prompts):
    model = load()
    engine = make(Role.UNIFIED)
    batch = requests(prompts[2:3], max_tokens=1, **{**GREEDY, "logprobs": 5})
    (output,) = collect(engine, batch)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompts[2]])).logits[0, -1], -1).topk(5)
    top = output.tokens[0].top
    assert [one.token_id for one in top] == expected.indices.tolist()
    assert [one.logprob for one in top] == pytest.approx(expected.values.tolist(), abs=1e-4)
    engine.close()


def test_context_longer_than_the_models_is_refused():
    with pytest.raises(ValueError, match="max_model_len=10000000 is more than the model's"):
        make(Role.UNIFIED, max_model_len=10_000_000)


def test_simulated_engine_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import millrace_serve.engine.sim.factory"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_simulated_device_runs_one_step_after_the_other():
    settings = SimSettings(step_s=2.0)
    now = [10.0]
    config = EngineConfig(num_pages=4, max_model_len=64)
    runner = SimRunner(settings, KvPool(sim_layout(config, settings), 4), config, clock=lambda: now[0])
    ready = [runner.launch(StepBatch.idle())._ready_at for _ in range(2)]
    now[0] = 20.0
    ready.append(runner.launch(StepBatch.idle())._ready_at)
    assert ready == [12.0, 14.0, 22.0]


def test_load_counts_what_happened():
    driver = Driver(Role.UNIFIED, max_prefill_tokens=100)
    driver.run(request(1, [20] * 9, max_tokens=3))
    driver.run(request(2, [20] * 9, max_tokens=3))
    load = driver.engine.load()
    names = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
    assert [load.counters[name] for name in names] == [18, 8, 6, 0]
    assert (load.running, load.waiting, load.pages_running) == (0, 0, 0)
    assert load.pages_free + load.pages_cached == load.pages_total == driver.config.num_pages - 1
