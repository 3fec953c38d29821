"""Puts a simulated engine together. No torch; engine/start/torch_factory.py makes the real one."""

import hashlib
import time

from millrace_serve.engine.cache.kv_pool import ITEM_BYTES, KvLayout, KvPool
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.schedule.factory import Clock, make_scheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.sim.runner import SimRunner, SimSettings
from millrace_serve.engine.step.batch import BatchBuilder


def sim_layout(config: EngineConfig, settings: SimSettings) -> KvLayout:
    """A row of bytes as KV, and always the canary."""
    tokens = ITEM_BYTES["bfloat16"] * config.page_size
    width = max(settings.page_kv_bytes // tokens, 1)
    names = repr((settings.vocab_size, settings.eos_token_id, settings.eos_lengths))
    return KvLayout(
        page_size=config.page_size,
        num_layers=1,
        dtype="bfloat16",
        latent_width=width,
        rope_width=0,
        canary=True,
        model_hash="sim-" + hashlib.blake2b(names.encode(), digest_size=8).hexdigest(),
    )


def build_sim_engine(
    config: EngineConfig,
    role: Role,
    settings: SimSettings,
    lockstep: Lockstep | None = None,
    clock: Clock = time.monotonic,
    grammars: Grammars | None = None,
) -> Engine:
    """The canary is always on: it is what stands for KV."""
    config = config.model_copy(update={"checks": (*config.checks, "canary")})
    pool = KvPool(sim_layout(config, settings), config.num_pages)
    facts = ModelFacts(settings.vocab_size, frozenset((settings.eos_token_id,)))
    grammars = grammars or Grammars()
    scheduler = make_scheduler(config, role, facts, clock, grammars)
    runner = SimRunner(settings, pool, config)
    return Engine(config, scheduler, grammars, BatchBuilder(config, runner.join), runner, pool, lockstep)
