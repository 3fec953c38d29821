"""What the simulated engine must answer."""

import random

from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SimSettings

from millrace_testing.oracle import oracle_outputs

SETTINGS = SimSettings()


def expected(prompt: list[int], max_tokens: int, settings: SimSettings = SETTINGS) -> list[int]:
    """Of a greedy request that ignores the end of sequence."""
    return oracle_outputs(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), settings)


def prompt_of(length: int) -> list[int]:
    return [random.randrange(SETTINGS.vocab_size) for _ in range(length)]
