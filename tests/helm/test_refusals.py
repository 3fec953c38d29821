"""Values that cannot work are refused while the chart renders, with a message that names them (refusals.yaml)."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_bench.v3 import V3
from millrace_chart.config_schema import OWNED, config_schemas
from millrace_chart.render import CHART, ChartError, presets, template, values
from millrace_serve.engine.config import Role
from millrace_serve.model.config import ModelConfig
from millrace_serve.plan.settings import Goal, Setup, decide
from millrace_testing.charts import CPU, FILES, GIVEN, VARIANTS, of_kind, pods, rendered

pytestmark = pytest.mark.helm
REFUSED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text())
POOL = (  # kinds that are called as their pool
    *("Service", "Deployment", "StatefulSet", "LeaderWorkerSet", "NetworkPolicy"),
    *("PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject"),
)


@pytest.mark.parametrize(("file", "sets", "said"), REFUSED["chart"], ids=lambda part: str(part)[:40])
def test_combination_that_cannot_work_is_refused(file: str, sets: list[str], said: str) -> None:
    with pytest.raises(ChartError, match=re.escape(said)):
        rendered_of(file, sets)


def rendered_of(file: str, sets: Iterable[str]) -> str:
    """Of a file of values or a variant."""
    path, own = VARIANTS[file] if file in VARIANTS and file not in FILES else (FILES[file], ())
    return template((path,), (*own, *sets))


@pytest.mark.parametrize("prefill", Goal)
@pytest.mark.parametrize("decode", Goal)
def test_goals_may_differ_where_pages_do_not(prefill: Goal, decode: Goal) -> None:
    """As the plan decides them."""
    model = ModelConfig(num_hidden_layers=61, num_nextn_predict_layers=1, **V3)
    goals = {Role.PREFILL: prefill, Role.DECODE: decode}
    chosen = [decide(Setup(model, "H200", 1, 8, role, goal)) for role, goal in goals.items()]
    kinds = {choice.value for choices in chosen for choice in choices if choice.key == "kv_dtype"}
    sets = tuple(f"workers.{role}.config.goal={goal}" for role, goal in goals.items())
    with pytest.raises(ChartError, match=r"config\.kv_dtype differs") if len(kinds) > 1 else nullcontext():
        template((FILES["pair"],), sets)


def test_value_beyond_the_schema_is_refused_by_its_name() -> None:
    """All at once, but for those of one key: the schema is not content with the first."""
    left: list[str] = REFUSED["schema"]
    while left:
        some = {item.partition("=")[0]: item for item in left}
        left = [item for item in left if item not in some.values()]
        with pytest.raises(ChartError, match="values don't meet the specifications of the schema") as caught:
            template((CPU,), tuple(some.values()))
        lines = str(caught.value).splitlines()
        assert [item for key, item in some.items() if not named_in(lines, key)] == []
        assert "validate" not in str(caught.value), "it says what is wrong, not how it was found out"


def named_in(lines: list[str], key: str) -> bool:
    """Whether a line is about the key, or about what is above it and names what is wrong or lacking there."""
    parts = re.sub(r"\[(\d+)\]", r".\1", key).split(".")
    places = [("(root)", parts[0]), *((".".join(parts[:i]), parts[i]) for i in range(1, len(parts)))]
    about = [rf"{re.escape(at)}: .*\b({re.escape(name)}|\w+ is required)\b" for at, name in places]
    return any(re.match(rf"- ({'|'.join(about)}|{re.escape('.'.join(parts))}: )", line) for line in lines)


@pytest.mark.parametrize("sets", REFUSED["possible"], ids=str)
def test_value_that_is_just_possible_is_taken(sets: list[str]) -> None:
    assert rendered_of(sets[0], sets[1:])


@pytest.mark.parametrize("name", ["cpu-tiny", "h200-1p1d-16gpu", "groups"])
@pytest.mark.parametrize("part", ["router", "decode"])
def test_variable_of_the_user_is_never_set_twice(name: str, part: str) -> None:
    """Helm 4 and Argo CD apply in a way that refuses it. What the chart sets itself is refused, or is the user's."""
    at = "router" if part == "router" else f"workers.{part}"

    def variables(*sets: str) -> list[str]:
        found = pods(of_kind(rendered(name, *sets), "Deployment", "LeaderWorkerSet"))
        (spec, *_) = (spec for where, spec in found if where.split("/")[1] == f"demo-millrace-{part}")
        return [entry["name"] for entry in spec["containers"][0]["env"]]

    known = variables()
    with pytest.raises(ChartError, match="the chart sets this variable itself") as caught:
        variables(*(f"{at}.env.{variable}=a" for variable in known))
    refused = set(re.findall(r"[A-Za-z]\w+", str(caught.value).partition(f"{at}.env.")[2].partition(":")[0]))
    assert {"POD_NAME", "POD_IP", "HOME", "MILLRACE_RUN"} <= refused
    rest = [variable for variable in known if variable not in refused]
    assert sorted(variables(*(f"{at}.env.{variable}=a" for variable in rest))) == sorted(known)


def test_pool_with_the_name_of_another_object_is_refused() -> None:
    """An upgrade would end half-way, or an object would be two things in turn."""
    names = {
        item["metadata"]["name"].removeprefix("demo-millrace-")
        for variant in [*presets(), *VARIANTS]
        for item in of_kind(rendered(variant), *POOL)
        if item["metadata"]["name"] != f"demo-millrace-{item['metadata']['labels'].get('millrace/pool')}"
    }
    assert {"router", "router-pods", "prefill-leaders", "egress-router"} <= names
    reserved = re.search(r"\$reserved := list (.*) -}}", (CHART / "templates" / "_checks.tpl").read_text())
    pattern = re.search(r'regexMatch "(\(\^.*\$\))" \$pool\.name', (CHART / "templates" / "_checks.tpl").read_text())
    assert reserved and pattern
    free = [name for name in names if f'"{name}"' not in reserved[1] and not re.search(pattern[1], name)]
    assert not free


def test_blank_value_is_the_empty_one() -> None:
    """`labels:` with nothing behind it. Helm takes such a key away."""

    def empty(node: dict[str, Any], at: str = "") -> Iterator[str]:
        for key, value in node.items():
            if value in ("", {}, []):
                yield f"{at}{key}"
            elif isinstance(value, dict):
                yield from empty(value, f"{at}{key}.")

    blank = tuple(f"{key}=null" for key in empty(values()) if key not in ("secret.secretName", "images.registry"))
    assert {"labels=null", "router.scheduling.affinity=null", "images.worker.digest=null"} <= set(blank)
    for name in ("cpu-tiny", "hpa"):
        assert rendered(name, *blank, GIVEN) == rendered(name, GIVEN)


@pytest.mark.parametrize("of", OWNED)
def test_schema_of_a_configuration_lacks_what_the_chart_sets(of: str) -> None:
    known = config_schemas()[of]["properties"]
    assert "drain" not in known["timeouts"]["properties"]
    assert not set(OWNED[of]) & known.keys()


def test_object_of_the_schema_is_closed_or_says_what_is_in_it() -> None:
    def open_ones(node: Any) -> list[Any]:
        parts = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        bad = isinstance(node, dict) and "properties" in node and node.get("additionalProperties") is not False
        return [
            *([node] if bad and isinstance(node["properties"], dict) else ()),
            *(it for p in parts for it in open_ones(p)),
        ]

    assert not open_ones(json.loads((CHART / "values.schema.json").read_text()))
