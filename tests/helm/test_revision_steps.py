"""The steps of docs/how-to/upgrade.md that put new pools beside the old: what each of them changes, and what not."""

from pathlib import Path

import pytest
from millrace_chart.render import RELEASE, Object, objects, template
from millrace_testing.charts import GIVEN, NO_DASHBOARDS, PAIR, PLAIN

pytestmark = pytest.mark.helm

NAME = f"{RELEASE}-millrace"
NEXT = """
workers:
  prefill-b: {role: prefill, revision: b, %s}
  decode-b: {role: decode, revision: b, %s}
"""
LAYOUT = ("config: {kv_dtype: float8_e4m3fn}, image: {tag: 0.2.0-cuda13}",) * 2
MODEL = ("model: {path: deepseek-v3.1}",) * 2
SWITCH = "router: {config: {routing: {revision: b}}}"
ROUTERS = """
model: {path: deepseek-v3.1}
workers:
  prefill: {model: {path: deepseek-v3}}
  decode: {model: {path: deepseek-v3}}
"""  # for a model with another tokenizer: the old pools keep theirs
LAST = "workers: {prefill: null, decode: null}"


@pytest.mark.parametrize(
    "steps",
    [(NEXT % LAYOUT, SWITCH, LAST), (NEXT % MODEL, ROUTERS + SWITCH, LAST)],
    ids=["layout", "model"],
)
def test_each_step_changes_one_thing(tmp_path: Path, steps: tuple[str, ...]) -> None:
    files = [PAIR]
    seen = [made(files)]
    for i, values in enumerate(steps):
        files.append(tmp_path / f"step-{i}.yaml")
        files[-1].write_text(values)
        seen.append(made(files))
    start, beside, switched, alone = seen
    new, old = beside.keys() - start.keys(), switched.keys() - alone.keys()
    assert {("Deployment", f"{NAME}-{role}-b") for role in ("prefill", "decode")} <= new
    assert {("Deployment", f"{NAME}-{role}") for role in ("prefill", "decode")} <= old
    assert changed(start, beside) == changed(switched, alone) == set()
    assert changed(beside, switched) == {("Deployment", f"{NAME}-router")}
    configs = {key for key in beside.keys() ^ switched.keys() if key[0] == "ConfigMap"}
    assert beside.keys() - switched.keys() < configs and len(configs) == 2, "the routers' old and new configuration"
    assert alone.keys() <= switched.keys()


def made(files: list[Path]) -> dict[tuple[str, str], Object]:
    """By kind and name, without what only `helm test` makes."""
    found = objects(template(tuple(files), (NO_DASHBOARDS, GIVEN, PLAIN)))
    hooks = [(item["metadata"].get("annotations") or {}).get("helm.sh/hook") for item in found]
    return {(it["kind"], it["metadata"]["name"]): it for it, hook in zip(found, hooks, strict=True) if hook != "test"}


def changed(before: dict[tuple[str, str], Object], after: dict[tuple[str, str], Object]) -> set[tuple[str, str]]:
    return {key for key in before.keys() & after.keys() if before[key] != after[key]}
