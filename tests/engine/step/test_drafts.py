"""Drafts change how many tokens a step gives, never which: every answer equals that of an engine without drafts.

The engine is the real one (engine/drafting.py). Faults that other systems have had with drafts, and their tests here:

    prefill without drafts, decode with them   test_drafts_kv.py: drafts or their KV do not come with a prompt;
                                               test_draft_tokens.py: workers with and without the layer never pair
    padded rows in graphs                      test_graphs.py: padding has length 0 and writes to the null page only;
                                               test_accept.py: a row without room is never accepted
    tensor-parallel ranks accept other tokens  test_parity_ranks.py: the answers of two by two ranks
    idle replicas do not draft and others hang test_drafts_ranks.py
    a cached page without its last draft KV    test_drafts_kv.py: drafts behind cached pages are of use
    noise shared by draft and target           test_drafts_sampling.py: chi-square, and tokens seed by seed
    rows of drafts taken for prompt chunks     test_answers_are_those_without_drafts: chunks beside drafts
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from engine.drafting import COUNTED, EVERY_STEP, GREEDY, SEEDED, SHAPED, Said, engine, questions, run, tokens
from engine.harness import request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import FinishReason, Grammar, GrammarKind, Request, Route, Submit
from millrace_serve.engine.drafts import speculate
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.config import CONFIG_FILE
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY
from millrace_testing.tolerances import LOGPROB_TOLERANCE

CPU = torch.device("cpu")


LENGTHS = (1, 63, 64, 65, 130)


def mixed() -> list[Request]:
    """Prompts that end beside and at the edges of pages; every kind of sampling; ends by EOS, stop token and length."""
    prompts = [[10 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS] + questions()
    kinds = [GREEDY, SEEDED, COUNTED, SHAPED]
    return [
        request(room, prompt, max_tokens=12 + room, logprobs=1, **kinds[room % 4])
        for room, prompt in enumerate(prompts)
    ]


@functools.cache
def plain() -> Said:
    return run(engine(0), mixed())


@pytest.mark.parametrize(
    ("drafts", "graphs", "limits"),
    [
        (1, "off", {}),
        (2, "off", {"overlap": False}),
        # every number of drafts, graphs and eager steps
        (3, "on", {"draft_batches": (7, 4, 2), "prefix_cache": False, "max_prefill_tokens": 33}),
    ],
)
def test_answers_are_those_without_drafts(drafts: int, graphs: str, limits: dict[str, object]) -> None:
    one = engine(drafts, graphs=graphs, **limits)
    said = run(one, mixed())
    check(said, plain())
    drafted, accepted = one.load().drafted, one.load().accepted
    assert len(drafted) == drafts and accepted[0] > 0
    assert all(0 <= some <= all_ and all_ > 0 for some, all_ in zip(accepted, drafted, strict=True))
    last = [outputs[-1] for outputs in said.values()]
    assert sum(output.num_drafted for output in last) == sum(drafted)
    assert sum(output.num_accepted for output in last) == sum(accepted)


def check(said: Said, expected: Said) -> None:
    assert tokens(said) == tokens(expected)
    for room, outputs in said.items():
        assert outputs[-1].finish is expected[room][-1].finish
        values = [[token.logprob for output in one for token in output.tokens] for one in (outputs, expected[room])]
        assert values[0] == pytest.approx(values[1], abs=LOGPROB_TOLERANCE)
        tops = [
            [token.top[0].token_id for output in one for token in output.tokens] for one in (outputs, expected[room])
        ]
        assert tops[0] == tops[1]


def test_preempted_sequences_go_on_as_they_would_have() -> None:
    """Too few pages for all: sequences give way, and are computed again from prompt and outputs."""
    prompts = (questions() * 2)[:4]
    wanted = [request(room, prompt[:60], max_tokens=30, **SEEDED) for room, prompt in enumerate(prompts)]
    roomy = run(engine(0, page_size=16), wanted)
    tight = engine(3, page_size=16, num_pages=12)
    assert tokens(run(tight, wanted)) == tokens(roomy)
    assert tight.load().counters["preemptions"] > 0 and sum(tight.load().accepted) > 0


def longest() -> list[Request]:
    """A sequence that fills a page to its end."""
    return [request(1, questions()[0] + questions()[1] + [20], max_tokens=28, **SEEDED)]


@functools.cache
def longest_plain() -> Said:
    return run(engine(0, max_model_len=128), longest())


@pytest.mark.parametrize("checks", [("poison",), ("canary", "poison")])
def test_sequence_may_fill_the_last_page(checks: tuple[str, ...]) -> None:
    """Its last rows lie behind the longest sequence that there may be."""
    found = tokens(run(engine(3, max_model_len=128, checks=checks), longest()))
    assert found == tokens(longest_plain()) and len(found[1]) == 28


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_sequence_may_reach_the_models_last_position(graphs: str, tmp_path: Path) -> None:
    """Rows of its drafts lie behind that position. On a GPU an index behind the end of a table ends the rank."""
    model = tmp_path / "short"
    shutil.copytree(TINY, model)
    facts = json.loads((model / CONFIG_FILE).read_text())
    (model / CONFIG_FILE).write_text(json.dumps({**facts, "max_position_embeddings": 128}))
    found = tokens(run(engine(3, graphs=graphs, model=model, max_model_len=128), longest()))
    assert found == tokens(longest_plain()) and len(found[1]) == 28


@pytest.mark.parametrize(("drafts", "token"), [(1, -1), (3, 999)])
def test_wrong_and_missing_drafts_cost_only_rows(drafts: int, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "sample_tokens", lambda logits, *_, **__: torch.full(logits.shape[:1], token))
    one = engine(drafts)
    check(run(one, mixed()), plain())
    drafted, accepted = one.load().drafted, one.load().accepted
    assert (sum(drafted) == 0) is (token == -1) and sum(accepted) <= 3


def test_draft_of_not_a_number_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of the MTP layer that was never written may hold anything."""
    forward = DeepseekV3.forward_mtp
    monkeypatch.setattr(DeepseekV3, "forward_mtp", lambda *args: forward(*args).fill_(torch.nan))
    check(run(engine(2), mixed()), plain())


def test_most_drafts_are_accepted_where_the_model_is_sure() -> None:
    one = engine(3)
    run(one, [request(room, ids, max_tokens=40, ignore_eos=False, **GREEDY) for room, ids in enumerate(questions())])
    drafted, accepted = one.load().drafted, one.load().accepted
    assert accepted[0] / drafted[0] > 0.7, (drafted, accepted)


def test_stop_tokens_end_an_answer_in_the_middle_of_accepted_drafts() -> None:
    prompt = questions()[0]
    whole = tokens(run(engine(0), [request(0, prompt, max_tokens=14, ignore_eos=True, **GREEDY)]))[0]
    ends = set()
    for stop in dict.fromkeys(whole[2:8]):
        said = run(engine(3), [request(0, prompt, max_tokens=14, stop_token_ids=(stop,), ignore_eos=True, **GREEDY)])
        assert tokens(said)[0] == whole[: whole.index(stop) + 1] and said[0][-1].finish is FinishReason.STOP
        ends.add(len(said[0][-1].tokens))
    assert len(ends) > 1, "stops came at one place of a step only"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
}


def test_grammars_restrict_every_row() -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    wanted = [
        request(room, prompt, max_tokens=40, grammar=grammar, ignore_eos=False, **kind)
        for room, (prompt, kind) in enumerate(zip(questions(), (GREEDY, SEEDED, COUNTED), strict=True))
    ] + [request(9, questions()[0], max_tokens=30, **GREEDY)]
    expected = run(engine(0), wanted)
    one = engine(3)
    said = run(one, wanted)
    assert tokens(said) == tokens(expected)
    with_grammar = [said[room][-1] for room in range(len(wanted) - 1)]
    assert sum(output.num_accepted for output in with_grammar) > 0


def test_prefill_engine_drafts_the_tokens_behind_the_first_one() -> None:
    one = engine(2, Role.PREFILL)
    parts = []
    prompt = questions()[0]
    one.submit(Submit(request(1, prompt, Route.EXPORT, max_tokens=20, **GREEDY)))
    while one.has_work():
        parts += one.step().chunks
    one.close()
    expected = tokens(run(engine(0), [request(0, prompt, max_tokens=20, **GREEDY)]))[0]
    assert parts[-1].last and parts[-1].first.tokens[0].token_id == expected[0]
    assert len(parts[-1].first.drafts) == 2 and parts[-1].first.drafts[0] == expected[1]
    assert all(part.first is None for part in parts[:-1])


def test_simulated_acceptance_is_refused_for_real_weights() -> None:
    options = Execution(simulated_acceptance=(0.85,))
    with pytest.raises(ValueError, match="simulated_acceptance needs random_weights"):
        load_rank(Limits(num_pages=9, max_model_len=64, draft_tokens=1), Role.UNIFIED, TINY, ParallelDims(), CPU,
                  torch.float32, execution=options)  # fmt: skip


def test_simulated_acceptance_accepts_the_stated_share() -> None:
    options = Execution(simulated_acceptance=(0.8, 0.5, 0.3), random_weights=True)
    limits = Limits(num_pages=80, max_model_len=256, max_running=9, draft_tokens=3, draft_batches=EVERY_STEP)
    one = load_rank(limits, Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32, execution=options).engine()
    run(one, [request(room, [20 + room] * (5 + room), max_tokens=140, ignore_eos=True, **GREEDY) for room in range(9)])
    shares = [some / all_ for some, all_ in zip(one.load().accepted, one.load().drafted, strict=True)]
    assert shares == pytest.approx([0.8, 0.5, 0.3], abs=0.1)
