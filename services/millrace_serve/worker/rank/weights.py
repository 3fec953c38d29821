"""Other weights for a rank: read them over those that it has, and give its KV the name of the new ones."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from millrace_serve.worker.messages import SetWeights, WeightsSet
from millrace_serve.worker.rank.parts import Parts

log = logging.getLogger(__name__)


def set_weights(parts: Parts, on_layout: Callable[[], None], order: SetWeights) -> WeightsSet:
    """Never raises: a failure is in the answer. `on_layout`: the pool's layout has another fingerprint."""
    pool, error = parts.pool, ""
    try:
        model_hash = _load(parts, Path(order.path), order.check) if order.path else pool.layout.model_hash
        if not order.check:
            pool.layout = msgspec.structs.replace(pool.layout, model_hash=named(model_hash, order.version))
            on_layout()
    except ValueError as failure:  # a checkpoint that cannot be used
        log.error("cannot load weights %s: %s", order.version, failure)
        error = str(failure)
    except Exception as failure:
        log.exception("weights %s of %s: failed", order.version, order.path)
        error = f"{type(failure).__name__}: {failure}"
    return WeightsSet(pool.layout, error)


def _load(parts: Parts, path: Path, check: bool) -> str:
    if parts.load is None:
        raise ValueError("a simulated engine has no weights")
    if parts.engine is not None and not check:
        parts.engine.check_empty()
    return parts.load(path, check)


def named(model_hash: str, version: str) -> str:
    """Of weights with this version. A checkpoint's hash alone does not see every change that training makes."""
    return hashlib.blake2b(f"{model_hash} {version}".encode(), digest_size=16).hexdigest()
