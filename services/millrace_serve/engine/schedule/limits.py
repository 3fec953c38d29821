"""The limits of a request: those of a message by itself, of the model and of the engine. These are a worker's only
checks but for the lengths of lists, which its frontend checks (worker/frontend/convert.py). Routers check the first
kind before they send (flow/validate.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from millrace_common import sampling_limits as limits
from millrace_common.page_hash import MAX_SALT_BYTES
from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Failure, Grammar, Request, Route, SamplingParams


@dataclass(frozen=True, slots=True)
class ModelFacts:
    vocab_size: int
    eos_token_ids: frozenset[int]


def sequence_limit(request: Request) -> int:
    """Tokens, prompt included, at which the sequence finishes by LENGTH."""
    return len(request.token_ids) - request.num_prior_outputs + request.sampling.max_tokens


def refusal(request: Request, config: EngineConfig, facts: ModelFacts, role: Role) -> Failure | None:
    """Return why `request` can never run here, or None."""
    if request.route not in role.routes:
        return _invalid(f"route {request.route} is not served by a {role} engine")
    if problem := next(_problems(request, facts), None):
        return _invalid(problem)
    exports = request.route is Route.EXPORT  # another worker generates
    total = len(request.token_ids) + 1 if exports else sequence_limit(request)
    if total > config.max_model_len:
        what = "prompt and first token" if exports else "prompt and max_tokens"
        message = f"{what} have {total} tokens; this engine has max_model_len={config.max_model_len}"
        return Failure(Reason.CONTEXT_TOO_LONG, message)
    kv_tokens = total - 1  # the last token is never fed back
    pages = -(-kv_tokens // config.page_size)
    if pages > config.num_pages - 1:
        message = (
            f"{kv_tokens} tokens need {pages} KV pages of {config.page_size}; this engine has {config.num_pages - 1}"
        )
        return Failure(Reason.CONTEXT_TOO_LONG, message)
    return None


def _problems(request: Request, facts: ModelFacts) -> Iterator[str]:
    """What is wrong with the request by itself and for this model; each names the field and its limit."""
    yield from _prompt_problems(request, facts.vocab_size)
    yield from _sampling_problems(request.sampling, facts.vocab_size)
    prior, most = request.num_prior_outputs, request.sampling.max_tokens
    if prior >= most:
        yield f"num_prior_outputs={prior} leaves nothing of max_tokens={most}"
    if request.sampling.grammar is not None:
        yield from _grammar_problems(request.sampling, request.sampling.grammar, facts.vocab_size)


def _prompt_problems(request: Request, vocab_size: int) -> Iterator[str]:
    num_tokens, prior = len(request.token_ids), request.num_prior_outputs
    if not num_tokens:
        yield "token_ids must not be empty"
    elif (largest := np.asarray(request.token_ids).max()) >= vocab_size:
        yield f"token_ids has {largest}; ids are 0..{vocab_size - 1}"
    if prior >= num_tokens:
        yield f"num_prior_outputs is {prior} of {num_tokens} token_ids"
    if len(request.cache_salt) > MAX_SALT_BYTES:
        yield f"cache_salt has {len(request.cache_salt)} bytes; the limit is {MAX_SALT_BYTES}"
    if not limits.PRIORITY.holds(request.priority):
        yield f"priority is {request.priority}; it must be {limits.PRIORITY}"


def _sampling_problems(params: SamplingParams, vocab_size: int) -> Iterator[str]:
    for name, allowed in limits.NUMBERS.items():
        value = getattr(params, name)
        if value is not None and not allowed.holds(value):
            yield f"{name} is {value:g}; it must be {allowed}"
    if params.min_tokens > params.max_tokens:
        yield f"min_tokens is {params.min_tokens}; it must be at most max_tokens={params.max_tokens}"
    for name in ("stop_token_ids", "logit_bias"):
        if any(token >= vocab_size for token in getattr(params, name)):
            yield f"{name} has a token id that is not in 0..{vocab_size - 1}"
    for token, bias in params.logit_bias.items():
        if not limits.LOGIT_BIAS.holds(bias):
            yield f"logit_bias of token {token} is {bias:g}; it must be {limits.LOGIT_BIAS}"


def _grammar_problems(params: SamplingParams, grammar: Grammar, vocab_size: int) -> Iterator[str]:
    """Of all but its text, which is checked where it is compiled (millrace_common/grammar/source.py)."""
    if params.ignore_eos:
        yield "ignore_eos must be false with a grammar"
    if params.min_tokens:
        yield "min_tokens must be 0 with a grammar"
    if grammar.after_token_id is not None and grammar.after_token_id >= vocab_size:
        yield f"grammar.after_token_id is {grammar.after_token_id}; ids are 0..{vocab_size - 1}"
    for mark in grammar.marks:
        if not 1 <= len(mark) <= limits.MAX_MARK_CHARS:
            yield f"grammar.marks has {len(mark)} characters; 1 to {limits.MAX_MARK_CHARS} are allowed"


def _invalid(message: str) -> Failure:
    return Failure(Reason.INVALID_ARGUMENT, message)
