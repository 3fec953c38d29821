"""Other weights for a rank: read them over those that it has, and give its KV the name of the new ones."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from millrace_serve.worker.messages import SetWeights, WeightsSet
from millrace_serve.worker.rank.parts import Parts

log = logging.getLogger(__name__)


class RankWeights:
    def __init__(self, parts: Parts, on_layout: Callable[[], None]) -> None:
        """`on_layout`: the pool's layout has another fingerprint."""
        self._parts, self._on_layout = parts, on_layout

    def set(self, order: SetWeights) -> WeightsSet:
        """Never raises: a failure is in the answer, and the frontend decides what follows."""
        pool, error = self._parts.pool, ""
        try:
            model_hash = self._load(Path(order.path), order.check) if order.path else pool.layout.model_hash
            if not order.check:
                pool.layout = msgspec.structs.replace(pool.layout, model_hash=named(model_hash, order.version))
                self._on_layout()
        except Exception as failure:
            log.exception("weights %s of %s: failed", order.version, order.path)
            error = f"{type(failure).__name__}: {failure}"
        return WeightsSet(pool.layout, error)

    def _load(self, path: Path, check: bool) -> str:
        """The checkpoint's hash; empty when it was only checked."""
        if self._parts.load is None:
            raise ValueError("a simulated engine has no weights")
        if self._parts.engine is not None and not check:
            self._parts.engine.check_empty()
        return self._parts.load(path, check)


def named(model_hash: str, version: str) -> str:
    """Of weights with this version. A checkpoint's hash alone does not see every change that training makes."""
    return hashlib.blake2b(f"{model_hash} {version}".encode(), digest_size=16).hexdigest()
