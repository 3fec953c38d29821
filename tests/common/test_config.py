"""Configuration files and overrides: what is accepted, and that every mistake is named."""

from pathlib import Path

import pytest
from millrace_common.config import LONGEST_S, RENAMED, Config, ConfigError, load
from millrace_router import config as router_config
from millrace_router.config import RouterConfig
from millrace_serve.engine.sim.runner import SimSettings
from millrace_serve.worker import config as worker_config
from millrace_serve.worker.config import WorkerConfig
from pydantic import Field


class Inner(Config):
    size: int = Field(4, ge=1)
    names: tuple[str, ...] = ()


class Outer(Config):
    model: str
    ratio: float = 0.5
    inner: Inner = Inner()


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_file_then_overrides(file) -> None:
    path = file("model: a\ninner:\n  size: 2\n  names: [x]\n")
    config = load(Outer, path, ["inner.size=7", "ratio=0.25"])
    assert config == Outer(model="a", ratio=0.25, inner=Inner(size=7, names=("x",)))


def test_an_old_key_holds_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sim = ["engine=sim", "limits.share_prompts=256", "dp=2", "spare_experts=1"]
    config = load(WorkerConfig, overrides=[*sim, "limits.max_parked_pages=9"])
    assert (config.limits.context_parallel_tokens, config.limits.max_held_pages, config.redundant_experts) == (
        256,
        9,
        1,
    )
    assert [new for _, new in RENAMED.items() if f"set {new}" not in caplog.text] == []
    with pytest.raises(ConfigError, match="share_prompts is the old name of context_parallel_tokens"):
        load(WorkerConfig, overrides=[*sim, "limits.context_parallel_tokens=256"])


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}"])
def test_empty_file_is_no_configuration(file, text: str) -> None:
    assert load(Outer, file(text), ["model=a"]) == Outer(model="a")


def test_override_reaches_into_an_empty_section(file) -> None:
    assert load(Outer, file("model: a\ninner:\n"), ["inner.size=3"]).inner.size == 3


def test_override_values_are_yaml_and_the_last_counts() -> None:
    items = ["model=b", "model='00=7'", "inner.names=[a, b]"]
    assert load(Outer, None, items) == Outer(model="00=7", inner=Inner(names=("a", "b")))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["model=a", "modle=b"], "modle: unknown key"),
        (["model=a", "inner.sise=1"], "inner.sise: unknown key"),
        ([], "model: required"),
        (["model=a", "inner.size=0"], "inner.size: .*greater than or equal to 1.*got 0"),
        (["model=a", "ratio=fast"], "ratio: .*number.*got 'fast'"),
        (["model=a", "inner=3"], "inner: .*got 3"),
        (["model=a", "model.x=1"], "'model' is not a section"),
        (["model"], "not of the form"),
        (["=3"], "not of the form"),
        (["model=[1"], "not YAML"),
    ],
)
def test_mistake_in_an_override_is_named(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Outer, None, items)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, None, ["ratio=x", "foo=1"])
    assert {part.split(":")[0] for part in str(caught.value).split("; ")} == {"model", "ratio", "foo"}


@pytest.mark.parametrize("text", ["model: [", "- a\n- b\n", "just text", b"model: \xff\xfe"])
def test_bad_file_is_named(file, text: str | bytes) -> None:
    path = file(text)
    with pytest.raises(ConfigError, match=str(path)):
        load(Outer, path)
    path.unlink()
    with pytest.raises(ConfigError, match=str(path)):
        load(Outer, path)


ROUTER, WORKER = ("model=x",), ("engine=sim",)
TIMES = [
    *((RouterConfig, ROUTER, f"timeouts.{name}") for name in router_config.Timeouts.model_fields),
    *((WorkerConfig, WORKER, f"timeouts.{name}") for name in worker_config.WorkerTimeouts.model_fields),
    *((WorkerConfig, WORKER, f"sim.{name}") for name in SimSettings.model_fields if name.endswith("_s")),
    (RouterConfig, ROUTER, "connections.max_age"),
    *((RouterConfig, ROUTER, f"routing.slo.{name}") for name in router_config.SloConfig.model_fields),
    (RouterConfig, ROUTER, "resilience.outliers.pause"),
]


@pytest.mark.parametrize(("kind", "fixed", "key"), TIMES)
def test_no_time_is_longer_than_timers_take(kind: type[Config], fixed: tuple[str, ...], key: str) -> None:
    load(kind, None, [*fixed, f"{key}={LONGEST_S}"])
    for value in (LONGEST_S + 1, 1e30, -1, ".inf", "-.inf", ".nan"):
        with pytest.raises(ConfigError, match=key):
            load(kind, None, [*fixed, f"{key}={value}"])


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("key", ["routing.cache_weight", "resilience.retries.per_s"])
def test_settings_are_finite(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .*finite number"):
        load(RouterConfig, None, [*ROUTER, f"{key}={value}"])
