"""Every compilation is counted once; stand-ins of the libraries, whose hooks exist in the installed Triton."""

import inspect
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from millrace_serve.engine.start import compilations
from millrace_serve.engine.start.compilations import Compilations


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "LOOK_S", 120.0, raising=False)


def test_triton_counts_what_does_not_come_from_its_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = Compilations(tmp_path)
    facts = {"src": SimpleNamespace(name="_kernel"), "times": SimpleNamespace(total=1_500_000)}
    more = {"metadata": {}, "metadata_group": {}}
    seen.on_triton(**facts, **more, cache_hit=False)
    assert seen.counts() == {} and not caplog.records, "the start is not over"
    seen.start_is_over()
    seen.on_triton(**facts, **more, cache_hit=True)
    assert seen.counts() == {}
    with caplog.at_level(logging.WARNING):
        seen.on_triton(**facts, **more, cache_hit=False)
    assert seen.counts() == {"triton": 1} and "triton compiled _kernel in 1.5 s after the start" in caplog.text


def test_triton_has_the_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(knobs.compilation, "listener", None)
    seen = Compilations(tmp_path)
    seen.subscribe()
    assert knobs.compilation.listener == seen.on_triton
    given = inspect.signature(knobs.CompilationListener.__call__).parameters
    assert {"src", "times", "cache_hit"} <= given.keys()
    assert isinstance(knobs.CompileTimes.total, property)


def test_kernels_that_come_into_the_folder_of_deep_gemm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    (folder / "kernel.a").mkdir(parents=True)
    seen = Compilations(folder)
    assert seen.counts() == {}, "it was there"

    def compiled(*names: str) -> None:
        for name in names:
            (folder / name).mkdir()
        seen._changed_at = 0  # two changes may have one time stamp

    compiled("kernel.b", "kernel.c")  # of the processes that compile ahead; nobody has counted since
    seen.start_is_over()
    assert seen.counts() == {}, "the start is over, and they belong to it"
    for name, count in (("kernel.d", 1), ("kernel.e", 2)):
        compiled(name)
        assert seen.counts() == {"deep_gemm": count}
    compiled("kernel.f", "kernel.g")
    assert seen.counts() == {"deep_gemm": 4} and seen.counts() == {"deep_gemm": 4}
    said = [record.getMessage().split(" after ")[0] for record in caplog.records]
    assert said == [*["deep_gemm compiled 1 product(s)"] * 2, "deep_gemm compiled 2 product(s)"]


def test_folder_that_is_not_there_yet_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Compilations(tmp_path / "cache")
    seen.start_is_over()
    assert seen.counts() == {}
    (tmp_path / "cache" / "kernel.a").mkdir(parents=True)
    for call in ("stat", "listdir"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, Mock(side_effect=OSError(5, "")))
            assert seen.counts() == {}
    assert seen.counts() == {"deep_gemm": 1}


def test_folder_that_hangs_holds_up_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, answers, looks, listdir = Compilations(tmp_path), threading.Event(), list[Path](), os.listdir

    def hangs(folder: Path) -> list[str]:
        looks.append(folder)
        assert answers.wait(20)
        return listdir(folder)

    monkeypatch.setattr(compilations, "LOOK_S", 0.0)
    monkeypatch.setattr(os, "listdir", hangs)
    seen.start_is_over()
    (tmp_path / "kernel.a").mkdir()
    seen._changed_at = 0
    for _ in range(3):
        assert seen.counts() == {}
    answers.set()
    seen._looking.join()
    assert seen.counts() == {"deep_gemm": 1} and looks == [tmp_path], "nobody asked while it hung"


def test_modules_of_flashinfer_that_are_built(tmp_path: Path) -> None:
    seen, spec = Compilations(tmp_path / "cache"), SimpleNamespace(name="prefill", jit_library_path=tmp_path / "a.so")

    def build(spec: SimpleNamespace, verbose: bool) -> str:
        if not spec.jit_library_path.exists():
            spec.jit_library_path.touch()
        return f"built {verbose}"

    seen.start_is_over()
    counted = seen.counted_build(build)
    assert [counted(spec, False), counted(spec, verbose=True)] == ["built False", "built True"]
    assert seen.counts() == {"flashinfer": 1}
