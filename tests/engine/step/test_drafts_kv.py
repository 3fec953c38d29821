"""Drafts and the KV of the MTP layer that come from elsewhere: from a prefill worker, or from the prefix cache.

Whatever comes, the tokens are those of an engine without drafts; and what comes in order is of use.
"""

import functools
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from engine.drafting import GREEDY, SEEDED, engine, questions, run, tokens
from engine.harness import request
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import KvArrived, KvChunk, KvOffered, Request, Route, Submit
from millrace_serve.engine.engine import Engine
from msgspec.structs import replace

PAGE = 64  # tokens


def prompt() -> list[int]:
    """More than a page."""
    return questions()[0]


def asked(route: Route) -> Request:
    return request(1, prompt(), route, max_tokens=24, **SEEDED)


def prefilled() -> tuple[Engine, KvChunk]:
    """An engine that has the prompt's pages, and its last part."""
    one = engine(3, Role.PREFILL, num_pages=9)
    one.submit(Submit(asked(Route.EXPORT)))
    parts = []
    while one.has_work():
        parts += one.step().chunks
    pages = [page for part in parts for page in part.page_ids]
    return one, KvChunk(parts[-1].id, 0, pages, [], len(prompt()), True, parts[-1].first)


def decoded(one: Engine, source: Engine, part: KvChunk, drafts: tuple[int, ...]) -> list[list[int]]:
    """The tokens of each step for the request, whose pages travel from `source`; the first one comes with them."""
    one.submit(Submit(asked(Route.IMPORT)))
    one.submit(KvOffered(part.id))
    [reserved] = one.step().reserved
    theirs, ours = (each.pool.buffer.view(each.pool.num_pages, -1) for each in (source, one))
    ours[reserved.page_ids] = theirs[part.page_ids]
    one.submit(KvArrived(part.id, replace(part.first, drafts=drafts)))
    said = [[part.first.tokens[0].token_id]]
    while one.has_work():
        for output in one.step().outputs:
            assert output.error is None, output.error
            said.append([token.token_id for token in output.tokens])
    one.check_idle()
    one.close()
    return said


@functools.cache
def expected() -> list[int]:
    return tokens(run(engine(0), [asked(Route.LOCAL)]))[1]


@pytest.mark.parametrize(
    ("drafts", "at_once"),
    [
        (lambda part: part.first.drafts, 4),
        (lambda part: (expected()[1], 5), 2),
        (lambda part: (5, *expected()[2:4]), 1),
        (lambda part: (expected()[1], 2**31), 2),  # no token
        (lambda part: (), 1),  # of a prefill worker that sends none
    ],
)
def test_drafts_that_come_with_a_prompt_are_verified_first(
    drafts: Callable[[KvChunk], tuple[int, ...]], at_once: int
) -> None:
    source, part = prefilled()
    one = engine(3, Role.DECODE)
    said = decoded(one, source, part, drafts(part))
    source.close()
    assert list(chain(*said)) == expected() and len(said[1]) == at_once
    assert one.load().accepted[0] > 3, "later drafts come from the KV that came"


def test_prompt_without_kv_of_the_mtp_layer_costs_drafts_only() -> None:
    source, part = prefilled()
    source.pool.view()[:, -1] = torch.nan
    one = engine(3, Role.DECODE)
    assert list(chain(*decoded(one, source, part, ()))) == expected()
    source.close()
    assert one.load().drafted[0] > 3 and one.load().accepted[0] < 2


@pytest.mark.parametrize("first_tail", [[], [7], list(range(20, 60))])
def test_drafts_are_of_use_behind_cached_pages(first_tail: list[int]) -> None:
    """The last row of a cached page was written with the token of another prompt behind it."""
    then = [request(1, prompt(), max_tokens=24, **GREEDY), request(2, [*prompt()[:PAGE], 9, 8], max_tokens=9, **SEEDED)]
    one = engine(3)
    one.submit(Submit(request(0, prompt()[:PAGE] + first_tail, max_tokens=3, **GREEDY)))
    while one.has_work():
        one.step()
    said = run(one, then)
    assert tokens(said) == tokens(run(engine(0), then))
    assert said[1][0].found.cached_tokens == said[2][0].found.cached_tokens == PAGE
    share = one.load().accepted[0] / one.load().drafted[0]
    assert share > 0.4, share
