"""Helm 4's own engine and schema validation on every preset, by its library for Python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_chart.render import CHART, preset_file, presets

sdk = pytest.importorskip("helm_sdkpy", reason="Helm 4's library needs Python 3.12")


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return {**base, **over, **both}


async def errors(folder: Path, values: dict[str, Any]) -> list[Any]:
    """What Helm has against the chart with these values as its own: the library's lint takes no others."""
    chart = folder / "millrace"
    shutil.copytree(CHART, chart)
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    (chart / "values.yaml").write_text(yaml.safe_dump(merged(default, values)))
    result = await sdk.Lint(sdk.Configuration(namespace="millrace")).run(str(chart))
    return result["Errors"] or []


@pytest.mark.parametrize("preset", presets())
async def test_presets(preset: str, tmp_path: Path) -> None:
    assert not await errors(tmp_path, yaml.safe_load(preset_file(preset).read_text()))


async def test_an_unknown_value(tmp_path: Path) -> None:
    assert await errors(tmp_path, {"workers": {"unified": {"gpu": 1}}})
