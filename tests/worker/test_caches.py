from pathlib import Path

import pytest
from millrace_serve.worker import caches


def test_every_library_compiles_below_one_folder(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/elsewhere", "PATH": "/bin"}
    environ.update(caches.variables(tmp_path))
    assert environ.pop("PATH") == "/bin"
    assert {name: environ.pop(name) for name in caches.SETTINGS} == caches.SETTINGS
    assert set(environ) == set(caches.FOLDERS.values())
    assert all(Path(folder).parent == tmp_path for folder in environ.values())


def test_home_folder_is_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert caches.variables(Path("~/.cache/millrace"))["DG_JIT_CACHE_DIR"] == "/home/somebody/.cache/millrace/deep_gemm"


def test_sizes_count_files_at_any_depth(tmp_path: Path) -> None:
    assert set(caches.sizes(tmp_path / "absent").values()) == {(0, 0)}
    inner = tmp_path / "triton" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "kernel.cubin").write_bytes(b"12345")
    (tmp_path / "triton" / "index").write_bytes(b"1")
    assert caches.sizes(tmp_path)["triton"] == (2, 6) and caches.sizes(tmp_path)["cuda"] == (0, 0)
