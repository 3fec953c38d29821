"""A worker's only check of a request: every field out of its range is refused with its name and its limit."""

import math
from array import array

import msgspec
import pytest
from millrace_common.reasons import Reason
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Grammar, GrammarKind, Request, RequestId, SamplingParams
from millrace_serve.engine.schedule.limits import ModelFacts, refusal

V = 1000
GOOD = Request(id=RequestId(1, 0), token_ids=[5, 6, V - 1], sampling=SamplingParams(max_tokens=4))
GRAMMAR = Grammar(GrammarKind.REGEX, "a", V - 1, (3,), ("<a>",))
SAMPLING = [
    *(("temperature", value) for value in (math.nan, math.inf, -0.1, 100.5)),
    *(("top_p", value) for value in (0.0, 1.1, math.nan)),
    *(("min_p", value) for value in (math.nan, -0.1)),
    *(("repetition_penalty", value) for value in (0.0, math.nan)),
    *(("presence_penalty", 2.1), ("frequency_penalty", -math.inf), ("logprobs", 21), ("max_tokens", 0)),
    *(("min_tokens", 5), ("stop_token_ids", (V,))),
    *(("logit_bias", bias) for bias in ({1: math.nan}, {1: 100.5}, {V: 0.0}, dict.fromkeys(range(1000 + 25), 0.0))),
]
GRAMMARS = [
    ("grammar.marks", {"marks": ("",)}),
    ("grammar.marks", {"marks": ("a" * 65,)}),
    ("grammar.after_token_id", {"after_token_id": V}),
]
REQUESTS = [
    ("token_ids", {"token_ids": memoryview(array("I"))}),
    *(("token_ids", {"token_ids": memoryview(array("I", ids))}) for ids in ([1, 2**32 - 1], [V, 1], [1, V, 2])),
    ("num_prior_outputs", {"num_prior_outputs": 3}),
    ("priority", {"priority": 101}),
    ("cache_salt", {"cache_salt": b"s" * 65}),
]


def why(request: Request) -> str:
    """Empty: it is taken."""
    failure = refusal(request, EngineConfig(num_pages=20, max_model_len=100), ModelFacts(V, frozenset()), Role.UNIFIED)
    assert failure is None or failure.reason == Reason.INVALID_ARGUMENT
    return "" if failure is None else failure.message


def with_sampling(**values: object) -> Request:
    return msgspec.structs.replace(GOOD, sampling=msgspec.structs.replace(GOOD.sampling, **values))


def test_requests_inside_every_limit_are_taken() -> None:
    assert not why(GOOD) and not why(msgspec.structs.replace(GOOD, token_ids=[5], cache_salt=b"s" * 64))
    assert not why(with_sampling(grammar=GRAMMAR, logprobs=20, stop_token_ids=(0,) * 64, logit_bias={V - 1: -100.0}))


@pytest.mark.parametrize(("field", "value"), SAMPLING)
def test_bad_sampling_is_refused_with_the_name_of_the_field(field: str, value: object) -> None:
    assert why(with_sampling(**{field: value})).startswith(field)


@pytest.mark.parametrize(("field", "change"), GRAMMARS)
def test_bad_grammars_are_refused_with_the_name_of_the_field(field: str, change: dict[str, object]) -> None:
    assert why(with_sampling(grammar=msgspec.structs.replace(GRAMMAR, **change))).startswith(field)


@pytest.mark.parametrize(("field", "change"), REQUESTS)
def test_bad_requests_are_refused_with_the_name_of_the_field(field: str, change: dict[str, object]) -> None:
    assert why(msgspec.structs.replace(GOOD, **change)).startswith(field)
