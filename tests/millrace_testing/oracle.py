"""The tokens of the simulated engine, computed without it (millrace_serve/engine/sim/runner.py)."""

from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SPECIAL_TOKENS, SimSettings, prompt_hash

MASK = (1 << 64) - 1
LENGTH_INDEX = -1  # output position whose hash decides the length


def oracle_token(hashed: int, seed: int, index: int, vocab: int) -> int:
    """Output token `index` of a prompt with prompt_hash(prompt) == hashed; greedy: seed 0. Never EOS."""
    return SPECIAL_TOKENS + _mix(_mix(hashed ^ _mix(seed)) + index) % (vocab - SPECIAL_TOKENS)


def oracle_length(hashed: int, settings: SimSettings) -> int | None:
    """Output length at which EOS comes, it included; None: never."""
    if settings.eos_lengths is None:
        return None
    low, high = settings.eos_lengths
    return low + _mix(_mix(hashed) + (LENGTH_INDEX & MASK)) % (high - low + 1)


def oracle_outputs(prompt: list[int], params: SamplingParams, settings: SimSettings) -> list[int]:
    """Everything that a request must return if the context is long enough."""
    hashed, seed = prompt_hash(prompt), params.seed if params.temperature > 0 else 0
    end = None if params.ignore_eos else oracle_length(hashed, settings)
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        at_end = end is not None and len(tokens) >= max(end - 1, params.min_tokens)
        drawn = oracle_token(hashed, seed, len(tokens), settings.vocab_size)
        tokens.append(settings.eos_token_id if at_end else drawn)
        if at_end or (drawn in params.stop_token_ids and len(tokens) > params.min_tokens):
            break
    return tokens


def _mix(x: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
