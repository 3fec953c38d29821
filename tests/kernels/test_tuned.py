"""The files of tuned configurations: which one holds on which GPU, and what the tuner writes into them."""

import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace_bench.kernels import tuned_file
from millrace_bench.kernels.tuned_file import Entry
from millrace_kernels import gpu as gpu_module
from millrace_kernels import tuned
from millrace_kernels.gpu import H200, Gpu, fitting
from millrace_kernels.triton import fp8_linear, mla_absorb, mla_decode, mla_prefill, moe_grouped, small_linear
from millrace_kernels.tuned import Table, Tuned, nearest
from millrace_load.record import ROOT
from millrace_serve.model.attn_step import FORM_TABLE
from torch import bfloat16

H20, H100, B200 = Gpu("NVIDIA H20", "sm90", 78), Gpu("NVIDIA H100 80GB HBM3", "sm90", 132), Gpu("B200", "sm100", 148)
TABLES = (
    fp8_linear.MEASURED, small_linear.MEASURED, moe_grouped.MEASURED, mla_absorb.ABSORB, mla_absorb.PROJECT_QUANT,
    FORM_TABLE,
)  # fmt: skip


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """This process's GPU is the parameter."""
    monkeypatch.setattr(tuned, "gpu", lambda: request.param)
    tuned.loaded.cache_clear()
    yield request.param
    tuned.loaded.cache_clear()


def files(*gpus: Gpu) -> list[Tuned]:
    return [Tuned(gpu, {}) for gpu in gpus]


def test_the_file_of_this_gpu_wins_then_the_nearest_of_its_architecture() -> None:
    found = nearest(H100, files(Gpu("A", "sm90", 132), H20, H100, B200))
    assert found is not None and found.gpu == H100
    for near, others in ((H200, (H20, H200, B200)), (H20, (H20, B200))):
        found = nearest(H100, files(*others))
        assert found is not None and found.gpu == near
    assert nearest(B200, files(H20, H200)) is None and nearest(H200, []) is None


@pytest.mark.parametrize("here", [H200, H100], indirect=True)
def test_a_gpu_that_was_tuned_takes_its_own_file(here: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    found = tuned.loaded()
    assert found is not None and found.gpu == here and not caplog.records
    read = {table.name: Table(table.name, *table.kinds.values()).rows for table in TABLES}
    assert {name: len(rows) for name, rows in found.tables.items()} == {name: len(rows) for name, rows in read.items()}
    tile = {H200: 32, H100: 64}[here]
    assert read["moe_grouped"][32, 33, 2048].block_m == tile  # type: ignore[attr-defined]
    for name, rows in found.tables.items():
        for row in rows:
            assert "as" in row or {"commit", "triton"} <= set(row), (name, row)
            assert "as" not in row or row["as"] in [other["key"] for other in rows], (name, row)


@pytest.mark.parametrize("here", [H200], indirect=True)
def test_kernels_run_as_the_file_of_their_gpu_says(here: Gpu) -> None:
    assert fp8_linear.config(100, 24576, 1536) == fp8_linear.Fp8LinearConfig(128, 64, 1, 4, 3, 168)
    assert small_linear.config(1, 2112, 7168) == small_linear.Gemv(2, 1024, 2)
    launch = moe_grouped.Launch(4, 3, left=True)
    assert moe_grouped.config(32, 33, 2048) == moe_grouped.MoeGroupedConfig(32, launch, launch)
    assert mla_absorb.ABSORB.get(256, 16, 2) == mla_absorb.Tile(64, 8, 128)


@pytest.mark.parametrize("here", [Gpu("NVIDIA H800", "sm90", 132), H20], indirect=True)
def test_another_hopper_takes_the_nearest_file_and_says_so_once(here: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    near = nearest(here, map(tuned.read, tuned.FOLDER.glob("*.json")))
    assert near is not None
    with caplog.at_level(logging.WARNING):
        for table in TABLES:
            keys = [tuple(row["key"]) for row in near.tables.get(table.name, [])]
            assert list(Table(table.name, *table.kinds.values()).rows) == keys
    (record,) = caplog.records
    assert str(here) in record.getMessage() and str(near.gpu) in record.getMessage()


@pytest.mark.parametrize("here", [B200], indirect=True)
def test_another_architecture_has_estimates(here: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Table("fp8_linear", fp8_linear.Fp8LinearConfig).rows == {} and Table("small_linear").get(1, 2, 3) is None
    (record,) = caplog.records
    assert "no kernel was tuned on sm100" in record.getMessage()


def estimates() -> list[object]:
    sizes, shapes = (17, 64, 128, 256, 300, 4096), ((2112, 7168), (7168, 2048), (24576, 1536))
    return [
        [fp8_linear._estimate(num, n, k) for num in sizes for n, k in shapes],
        [moe_grouped._estimate(rows) for rows in (1, 16, 32, 64, 128, 4096)],
        [mla_decode.config(rows, bfloat16) for rows in (1, 16, 128)],
        [mla_prefill.config(longest, bfloat16) for longest in (1, 64, 4096)],
    ]


def on(monkeypatch: pytest.MonkeyPatch, sms: int, shared: int) -> None:
    for module in (fp8_linear, mla_decode):
        monkeypatch.setattr(module, "sms", lambda: sms)
    monkeypatch.setattr(gpu_module, "shared_bytes", lambda: shared)


def test_estimates_follow_the_number_of_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 132, gpu_module.H200_SHARED)
    wide, split = fp8_linear._estimate(4096, 7168, 2048), fp8_linear._estimate(128, 2112, 7168).splits
    assert wide == fp8_linear.Fp8LinearConfig(128, 128, 1, 8, 4) and mla_decode.config(16, bfloat16).programs == 264
    on(monkeypatch, 78, gpu_module.H200_SHARED)
    assert fp8_linear._estimate(4096, 7168, 2048) == fp8_linear.Fp8LinearConfig(64, 128, 1, 4, 4)
    assert 1 < fp8_linear._estimate(128, 2112, 7168).splits < split
    assert mla_decode.config(16, bfloat16).programs == 156


def test_estimates_fit_into_less_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """99 KiB of a program on sm89 and sm120, 227 on sm90."""
    before, small = estimates(), 99 << 10
    on(monkeypatch, 132, small)
    assert estimates() != before
    for num in (64, 256, 4096):
        chosen = fp8_linear._estimate(num, 7168, 2048)
        assert chosen.stages * (chosen.block_m + chosen.block_n) * 128 < small
    for rows in (1, 64, 4096):
        experts = moe_grouped._estimate(rows)
        assert experts.up.stages * (experts.block_m + 256) * 128 < small
    for rows in (1, 16, 64, 128):
        decode, wide = mla_decode.config(rows, bfloat16), 2 * 576
        assert (decode.block_m + decode.num_stages * decode.block_n) * wide < small
    for longest in (1, 64, 4096):
        prefill = mla_prefill.config(longest, bfloat16)
        assert prefill.block_m * 2 * 192 + prefill.num_stages * prefill.block_n * 2 * (192 + 128) < small
    assert fitting(4, 40_000) == 2 and fitting(4, 1 << 20) == 1 and fitting(2, 8) == 2


def test_tuner_replaces_what_it_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    config, other = fp8_linear.Fp8LinearConfig(32, 64, 1, 4, 4), small_linear.Gemv(2, 512, 1)
    first = [
        Entry("a", (2, 1), config, 1.234, {"b": 2.0}),
        Entry("a", (1, 1), other, 1.0),
        Entry("b", (1,), config, 3.0),
    ]
    path = tuned_file.update(H20, first, "c0ffee", "3.6.0", tmp_path)
    assert path.name == "NVIDIA_H20-78.json" and tuned.read(path).gpu == H20
    changed = [Entry("a", (2, 1), None), Entry("c", (5, 6), config, 2.0), Entry("a", (0, 1), config, copy_of=(1, 1))]
    assert tuned_file.update(H20, changed, "beef", "3.7.0", tmp_path) == path
    tables = tuned.read(path).tables
    assert [row["key"] for row in tables["a"]] == [[0, 1], [1, 1]] and tables["a"][0]["as"] == [1, 1]
    assert (tables["b"][0]["commit"], tables["c"][0]["commit"], tables["c"][0]["triton"]) == ("c0ffee", "beef", "3.7.0")


def test_file_of_the_h200_is_as_the_tuner_writes_it() -> None:
    path = tuned_file.path_of(H200)
    assert path.read_text() == tuned_file.text(tuned.read(path))


def test_files_are_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["millrace_kernels"]
    package = tuned.FOLDER.parent
    assert set(package.glob(pattern)) == set(package.rglob("*.json")) >= {tuned_file.path_of(H200)}
