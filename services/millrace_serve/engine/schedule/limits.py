"""The limits of requests that depend on an engine and its model. The limits of a message by itself, token ids included,
are checked before it comes here (worker/frontend/convert.py, requests.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace_common.reasons import Reason

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Failure, Request, Route

ROUTES = {
    Role.PREFILL: {Route.EXPORT},
    Role.DECODE: {Route.IMPORT, Route.LOCAL},
    Role.UNIFIED: {Route.LOCAL},
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model for schedulers."""

    vocab_size: int
    eos_token_ids: frozenset[int]


def sequence_limit(request: Request) -> int:
    """Tokens, prompt included, at which the sequence finishes by LENGTH."""
    return len(request.token_ids) - request.num_prior_outputs + request.sampling.max_tokens


def refusal(request: Request, config: EngineConfig, facts: ModelFacts, role: Role) -> Failure | None:
    """Return why `request` can never run here, or None."""
    if request.route not in ROUTES[role]:
        return _invalid(f"route {request.route} is not served by a {role} engine")
    if problem := _problem(request, facts):
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


def _problem(request: Request, facts: ModelFacts) -> str | None:
    params, prior = request.sampling, request.num_prior_outputs
    if prior >= params.max_tokens:
        return f"num_prior_outputs={prior} leaves nothing of max_tokens={params.max_tokens}"
    vocab = range(facts.vocab_size)
    after = None if params.grammar is None else params.grammar.after_token_id
    checks = (
        ("stop_token_ids", all(token in vocab for token in params.stop_token_ids), "inside the vocabulary"),
        ("ignore_eos", params.grammar is None or not params.ignore_eos, "false with a grammar"),
        ("min_tokens", params.grammar is None or not params.min_tokens, "0 with a grammar"),
        ("grammar", after is None or after in vocab, "one whose after_token_id is inside the vocabulary"),
        ("logit_bias", all(token in vocab for token in params.logit_bias), "for ids inside the vocabulary"),
    )
    for name, ok, rule in checks:
        if not ok:
            return f"{name}={getattr(params, name)!r} must be {rule}"
    return None


def _invalid(message: str) -> Failure:
    return Failure(Reason.INVALID_ARGUMENT, message)
