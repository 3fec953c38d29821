"""What this process compiles after its start: kernels of Triton, DeepGEMM and FlashInfer, counted by library.

After a start every kernel should be there; a later compilation is one that a request waits for. It is logged as a
warning. The frontend counts those after READY (`millrace_worker_compilations_total`).

Triton and FlashInfer have hooks. DeepGEMM compiles in C++ and has none: its kernels are counted as they come into its
cache folder, so ranks that share the folder count a kernel each.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LOOK_S = 0.5  # what a look into the folder has found by then counts


class Compilations:
    def __init__(self, kernels: Path) -> None:
        """`kernels`: the folder in which DeepGEMM puts them."""
        self._started = False
        self._counts: Counter[str] = Counter()
        self._kernels, self._changed_at, self._num_kernels = kernels, -1, 0
        self._looking = threading.Thread()  # the latest look
        self._look()

    def subscribe(self) -> None:
        """Before the first kernel; libraries that are not there compile nothing."""
        from triton import knobs

        knobs.compilation.listener = self.on_triton
        try:
            from flashinfer.jit.core import JitSpec
        except Exception:  # it may fail in any way (kernels/backend.py logs how), and then compiles nothing
            return
        JitSpec.build = self.counted_build(JitSpec.build)

    def start_is_over(self) -> None:
        """From now on compilations count. What DeepGEMM's folder holds by now belongs to the start."""
        self._look()
        self._started = True

    def counts(self) -> dict[str, int]:
        """Of this process since its start was over, by library. Takes LOOK_S at most: a network's folder may not
        answer, and is not asked again before it has.
        """
        if not self._looking.is_alive():
            self._looking = threading.Thread(target=self._count_kernels, name="kernels-look", daemon=True)
            self._looking.start()
            self._looking.join(LOOK_S)
        return dict(self._counts)

    def on_triton(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:  # Triton's own
        """Triton's listener. What comes from its cache folder was compiled before."""
        if not cache_hit:
            self._count("triton", src.name, times.total / 1e6)

    def counted_build(self, build: Callable[..., object]) -> Callable[..., object]:
        """`build` of FlashInfer's modules, which also runs, and does nothing, for a module that is there."""

        def counted(spec: Any, *args: object, **options: object) -> object:  # FlashInfer has no types
            file, began = spec.jit_library_path, time.monotonic()
            before = _written_at(file)
            result = build(spec, *args, **options)
            if _written_at(file) != before:
                self._count("flashinfer", spec.name, time.monotonic() - began)
            return result

        return counted

    def _count(self, library: str, what: str, seconds: float | None, kernels: int = 1) -> None:
        if self._started:
            self._counts[library] += kernels
            took = "" if seconds is None else f" in {seconds:.1f} s"
            log.warning("%s compiled %s%s after the start: a request may have waited for it", library, what, took)

    def _count_kernels(self) -> None:
        if new := self._look():
            self._count("deep_gemm", f"{new} product(s)", None, new)

    def _look(self) -> int:
        """How many kernels have come into DeepGEMM's folder since the last look, if it can be read now."""
        before = self._num_kernels
        with contextlib.suppress(OSError):  # of a network's folder
            changed_at = self._kernels.stat().st_mtime_ns if self._kernels.exists() else 0
            if changed_at != self._changed_at:
                self._num_kernels = len(os.listdir(self._kernels)) if changed_at else 0
                self._changed_at = changed_at
        return max(self._num_kernels - before, 0)


def _written_at(path: Path) -> int:
    """Nanoseconds; 0 where there is nothing."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0
