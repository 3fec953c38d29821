"""Every filter against plain Python, the noise against chi-square, and independence of the batch."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from millrace_kernels.sample_tokens import gumbel_noise
from millrace_serve.engine.core import Request, RequestId, SamplingParams, TokenOutput
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.sampling import TokenTables, results, sample
from millrace_serve.engine.step.sampling_batch import SamplingBatch, SamplingTable
from millrace_serve.engine.step.staging import Staging

V = 24


@dataclass
class Sampled:
    tokens: np.ndarray  # int64 [S]
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def token(self, row: int, token_id: int, seq: Sequence) -> TokenOutput:
        columns = (self.logprobs, self.top_ids, self.top_logprobs)
        parts = (None if column is None else column[:, None] for column in columns)
        ones, none = np.ones(len(self.tokens)), self.tokens[:, None][:, :0]
        return StepOutput(self.tokens[:, None], ones, 0 * ones, none, *parts).outputs(row, [token_id], seq)[0]


class Bench:
    """Sequences on slots 0, 1, ... of one table, sampled together as often as wanted."""

    def __init__(self, *params: SamplingParams, prompt: list[int] | None = None, stops: frozenset[int] = frozenset()):
        self.table, self.tokens = SamplingTable(len(params)), TokenTables(V, torch.device("cpu"))
        self.staging = Staging(Device(), 0)
        self.seqs = []
        for slot, one in enumerate(params):
            request = Request(id=RequestId(slot, 0), token_ids=prompt or [0], sampling=one)
            seq = Sequence(request, (0, slot), 10**6, stops, [])
            seq.slot = slot
            self.table.join(seq)
            self.seqs.append(seq)

    def __call__(self, logits: torch.Tensor, index: int | torch.Tensor = 0) -> Sampled:
        """`index`: of the output; int64 [S], or one for all."""
        slots = np.arange(len(self.seqs))
        batch = self.table.gather(slots, len(slots), 1)
        if batch is None:
            answer = results(logits.argmax(dim=-1), None, -1)
        else:
            device = self.staging.upload(0, batch, SamplingBatch[torch.Tensor])
            output_index = torch.as_tensor(index).expand(len(slots))
            none = output_index[:, None][:, :0]
            chosen, raw = sample(logits.clone(), batch, device, output_index, none, self.tokens)
            if device.penalties is not None:
                self.tokens.add(chosen, torch.ones_like(chosen, dtype=torch.bool), device.penalties)
            answer = results(chosen, raw, batch.num_logprobs)
        return Sampled(**self.staging.download(0, answer)())


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 1.0, **fields})  # type: ignore[arg-type]


def draw_many(logits: torch.Tensor, count: int, **fields: object) -> np.ndarray:
    """Counts of tokens over `count` seeds."""
    bench = Bench(*(params(seed=seed, **fields) for seed in range(count)))
    return np.bincount(bench(logits.expand(count, V)).tokens, minlength=V)


def naive_probs(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The documented order, step by step."""
    weights = [math.exp(x / temperature) for x in logits]
    probs = [w / sum(weights) for w in weights]
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    keep = order[:top_k] if top_k else order
    mass, kept = 0.0, []
    total = sum(probs[t] for t in keep)
    for token in keep:
        if mass >= top_p and kept:
            break
        kept.append(token)
        mass += probs[token] / total
    kept = [t for t in kept if probs[t] >= min_p * max(probs)]
    total = sum(probs[t] for t in kept)
    return [probs[t] / total if t in kept else 0.0 for t in range(len(probs))]


LOGITS = torch.linspace(-2, 2, V)[torch.randperm(V, generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_temperature_that_logits_cannot_be_divided_by_is_greedy(temperature):
    bench = Bench(params(temperature=temperature, top_p=0.5), params(temperature=temperature, seed=1))
    assert bench(100 * LOGITS.expand(2, V)).tokens.tolist() == [int(LOGITS.argmax())] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.3},
    ],
)
def test_frequencies_match_the_filtered_distribution(fields):
    count = 2500
    found = draw_many(LOGITS, count, **fields)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
    probs = np.array(naive_probs(LOGITS.tolist(), **full))
    assert not found[probs == 0].any(), "a filtered token was drawn"
    live = probs > 0
    chi2 = float((((found - count * probs) ** 2)[live] / (count * probs[live])).sum())
    freedom = int(live.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * max(freedom, 1)), f"chi-square {chi2} with {freedom} degrees of freedom"


def test_positions_draw_independently_of_each_other():
    bench = Bench(*[params(seed=7)] * 3000)
    tokens = bench(LOGITS.expand(3000, V), torch.arange(3000)).tokens.tolist()
    pairs = np.zeros((2, 2))
    for a, b in itertools.pairwise(tokens):
        pairs[int(a > 11), int(b > 11)] += 1
    expected = pairs.sum(1, keepdims=True) * pairs.sum(0, keepdims=True) / pairs.sum()
    assert float(((pairs - expected) ** 2 / expected).sum()) < 15  # 1 degree of freedom; p < 1e-4


def test_draws_do_not_depend_on_batch_or_neighbours():
    alone = Bench(params(seed=2**64 - 5, top_p=0.9))(LOGITS[None], 17).tokens[0]
    crowd = Bench(
        params(temperature=0.0),
        params(seed=2**64 - 5, top_p=0.9),
        params(seed=1, top_k=3),
        params(seed=9, logprobs=3, frequency_penalty=1.0),
    )
    assert crowd(LOGITS.expand(4, V), 17).tokens[1] == alone


def test_noise_is_fixed_for_all_time():
    """A prefill and a decode worker of different versions must draw the same token."""
    noise = gumbel_noise(torch.tensor([1, -1]), torch.tensor([0, 5]), 3)
    expected = torch.tensor(NOISE)
    assert torch.allclose(noise, expected, atol=1e-6), noise.tolist()


NOISE = [[0.1564388, 3.28247, -0.1228536], [-0.2048277, -0.157318, -0.2789062]]


def test_greedy_takes_the_smallest_id_of_equals():
    logits = torch.zeros(1, V)
    logits[0, [4, 9]] = 3.0
    assert Bench(params(temperature=0.0))(logits).tokens[0] == 4


def test_top_k_takes_smaller_ids_among_equals():
    found = draw_many(torch.zeros(V), 300, top_k=3)
    assert set(np.flatnonzero(found)) == {0, 1, 2}


def test_top_p_keeps_at_least_one():
    assert set(np.flatnonzero(draw_many(LOGITS, 50, top_p=1e-9))) == {int(LOGITS.argmax())}


def test_penalties_match_plain_python_step_by_step():
    fields = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7, "temperature": 0.0}
    prompt = [1, 2, 2, 20]
    bench = Bench(params(**fields), params(temperature=0.0), prompt=prompt)
    outputs: list[int] = []
    for index in range(12):
        token = int(bench(LOGITS.expand(2, V), index).tokens[0])
        scores = []
        for t, x in enumerate(LOGITS.tolist()):
            if t in prompt or t in outputs:
                x = x / 1.3 if x > 0 else x * 1.3
            scores.append(x - 0.4 * (t in outputs) - 0.7 * outputs.count(t))
        assert token == max(range(V), key=lambda t: (scores[t], -t))
        outputs.append(token)
    assert len(set(outputs)) > 3


def test_repetition_penalty_that_logits_cannot_be_divided_by():
    best, second = LOGITS.argsort(descending=True)[:2].tolist()
    bench = Bench(params(repetition_penalty=1e-38, seed=1), prompt=[second, best])
    assert bench(LOGITS.expand(1, V)).tokens.tolist() == [best]


def test_slot_starts_again_for_its_next_owner():
    bench = Bench(params(frequency_penalty=2.0, temperature=0.0))
    first = [int(bench(LOGITS[None], i).tokens[0]) for i in range(3)]
    bench.table.join(bench.seqs[0])
    assert [int(bench(LOGITS[None], i).tokens[0]) for i in range(3)] == first


def test_logit_bias_and_min_tokens():
    best = int(LOGITS.argmax())
    bench = Bench(params(temperature=0.0, min_tokens=2), stops=frozenset((best,)))
    tokens = [int(bench(LOGITS[None], index).tokens[0]) for index in range(3)]
    assert tokens[0] != best and tokens[1] != best and tokens[2] == best
    assert Bench(params(temperature=0.0, logit_bias={5: 100.0}))(LOGITS[None]).tokens[0] == 5
    assert Bench(params(temperature=0.0, logit_bias={best: -100.0}))(LOGITS[None]).tokens[0] != best


def test_penalties_do_not_count_tokens_behind_a_refused_draft() -> None:
    """Of three rows of sequences with penalties the second was not accepted."""
    bench = Bench(*[params(temperature=0.0, presence_penalty=5.0)] * 3)
    logits = torch.zeros(3, V)
    bench(logits)  # all take token 0, which is counted
    batch = bench.table.gather(np.arange(3), 3, 1)
    assert batch is not None and batch.penalties is not None
    penalties = bench.staging.upload(0, batch, SamplingBatch[torch.Tensor]).penalties
    bench.tokens.add(torch.tensor([1, 1, 1]), torch.tensor([True, False, True]), penalties)
    assert bench(logits).tokens.tolist() == [2, 1, 2]


def test_grammar_allows_the_tokens_of_its_mask_alone() -> None:
    """The second row has a grammar; its mask has bits 3 and 20."""
    bench = Bench(*[params(temperature=0.0, logit_bias={5: 1.0})] * 2)
    batch = bench.table.gather(np.arange(2), 2, 1)
    assert batch is not None
    batch.grammar = np.array([1]), np.array([[1 << 3 | 1 << 20]], np.int32)
    logits = torch.zeros(2, V)
    logits[:, 20] = 0.5
    device, none = bench.staging.upload(0, batch, SamplingBatch[torch.Tensor]), torch.zeros(2, 0, dtype=torch.int64)
    tokens, _ = sample(logits, batch, device, torch.zeros(2, dtype=torch.int64), none, bench.tokens)
    assert tokens.tolist() == [5, 20]


def test_logprobs_are_of_the_raw_distribution():
    bench = Bench(params(temperature=0.3, logprobs=4, logit_bias={3: 50.0}), params(temperature=0.0, logprobs=0))
    output = bench(LOGITS.expand(2, V))
    raw = torch.log_softmax(LOGITS, 0)
    assert output.tokens[0] == 3
    token = output.token(0, 3, bench.seqs[0])
    assert token.logprob == pytest.approx(float(raw[3]), abs=1e-5)
    assert [top.token_id for top in token.top] == raw.argsort(descending=True)[:4].tolist()
    assert output.token(1, int(output.tokens[1]), bench.seqs[1]).top == ()
