"""Settings of the whole suite."""

import contextlib
import gc
import glob
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from millrace_testing import HANG_S

# Before torch is imported: several processes share few cores, where torch's own threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the entry points set it: ranks on GPUs share memory (millrace_kernels/peer), and their processes inherit it.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
# Before triton is imported, also by others such as transformers: without a GPU its kernels run in its interpreter.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests start hundreds of processes: what the first one compiles, the others read.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Hundreds of renders by helm: it ends before it is short of memory, and collecting takes a fifth of its time.
os.environ.setdefault("GOGC", "400")
# Before jsonschema is imported: it would build the parsers of a format that nothing here uses, for two seconds.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

with contextlib.suppress(ImportError):  # GPU hosts have no hypothesis
    from hypothesis import HealthCheck, settings

    # How long an example or its drawing takes says how busy the machine is.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

THAWED: list[None] = []  # calls of gc.unfreeze: the next test freezes again
TOGETHER = ("tests/e2e/", "tests/helm/")  # one cluster at a time; who has rendered a chart has it for all other tests


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a file, or of such a folder: what a module makes once is made once. Written out
    because the groups of pytest-xdist 3.8 are without effect under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    return ByFile(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m long`, files without a long test are not imported."""
    wanted = config.getoption("markexpr") == "long" and collection_path.suffix == ".py"
    return "mark.long" not in collection_path.read_text() or None if wanted else None


def pytest_collectstart() -> None:
    gc.disable()  # of what is imported nothing is garbage


def pytest_collection_finish() -> None:
    """What was imported stays: a full collection would look through all of it, for half a second each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def patient_checkers() -> Iterator[None]:
    """The processes that compile grammars are nicer than this one: a busy machine may give them no time for minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace_common.grammar.checker.WAIT_S", HANG_S)
        patch.setattr(gc, "unfreeze", lambda thaw=gc.unfreeze: THAWED.append(thaw()))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if THAWED:
        THAWED.clear()
        gc.freeze()
    root = logging.getLogger()  # the stderr that an entry point has found in a test before is closed
    root.handlers[:] = [one for one in root.handlers if not getattr(getattr(one, "stream", None), "closed", False)]
    if item.get_closest_marker("gpu"):
        import torch  # most tests need none

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and this machine has none")
