"""Limits of Kubernetes on names, numbers and what an upgrade may change, over all values and objects of the chart."""

import base64
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from millrace_chart.render import CHART, EDITED, KUBERNETES, RELEASE, ChartError, objects, run
from millrace_testing import kube_schema
from millrace_testing.charts import CPU, TABLES, VARIANTS, of_kind, rendered
from millrace_testing.kube_upgrade import refused

pytestmark = pytest.mark.helm
LOOKUPS = {  # in the chart: the kind and the name of what they ask for
    'lookup "apps/v1" .kind .root.Release.Namespace .name': '.kind "/" .name',
    'lookup "autoscaling/v2" "HorizontalPodAutoscaler" .root.Release.Namespace .pool.fullname': (
        '"HorizontalPodAutoscaler/" .pool.fullname'
    ),
    'lookup "v1" "Service" .root.Release.Namespace .pool.fullname': '"Service/" .pool.fullname',
}


def template_of(chart: Path, file: Path, sets: Iterable[str], release: str = RELEASE) -> list[str]:
    command = ["template", release, str(chart), "--kube-version", KUBERNETES, "--values", str(file)]
    for item in (EDITED, *sets):
        command += ["--set", item]
    return command


@pytest.mark.parametrize("name", ["groups", "tls", "keda", "hpa", "route", "warm", "hf", "statefulset", "egress"])
def test_longest_legal_names_fit_everywhere(name: str) -> None:
    """Of a release and a namespace, and of pools, which are named so that one character more is refused."""
    file, sets = VARIANTS[name]
    pool = "p" * ((49 if name == "groups" else 52) - 41)
    more = [f"workers.{pool}.role=unified"]
    if file != CPU:
        more += [f"workers.{pool}.{key}=8" for key in ("gpus", "dp")]
    command = template_of(CHART, file, (*sets, *more), release="r" * 53)
    items = objects(run([*command, "--namespace", "n" * 63]))
    assert pool in {item["metadata"]["labels"].get("millrace/pool") for item in items}
    assert not [problem for item in items for problem in kube_schema.check(item)]
    with pytest.raises(ChartError, match="more than"):
        run([part.replace(pool, f"{pool}p") for part in command])


def test_generated_certificate_has_a_common_name_that_every_library_reads() -> None:
    """At most 64 characters, which are fewer than the name of a Service may have."""
    items = objects(run([*template_of(CHART, CPU, ["tls.mode=generated"], "r" * 53), "--namespace", "n" * 63]))
    for data in (it["data"] for it in of_kind(items, "Secret") if "tls.crt" in it["data"]):
        subject = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"])).subject
        assert all(len(str(part.value)) <= 64 for part in subject)


def numbers(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every number in the schema that the chart itself reads."""
    if isinstance(node, dict):
        if "integer" in node.get("type", ()):
            yield at, node
        for key, child in node.items():
            if key not in ("routerConfig", "workerConfig"):
                yield from numbers(child, f"{at}.{key}")


def test_every_whole_number_has_limits_and_every_share_is_at_most_all() -> None:
    found = dict(numbers(json.loads((CHART / "values.schema.json").read_text())))
    assert len(found) > 50
    unlimited = [at for at, schema in found.items() if not {"minimum", "maximum"} <= schema.keys()]
    assert not unlimited
    shares = {schema["pattern"] for schema in found.values() if "string" in schema["type"]}
    assert shares == {"^(100|[1-9]?[0-9])%$"}


@pytest.mark.parametrize(("before", "after", "said"), TABLES["upgrades"])
def test_upgrade_that_would_fail_half_way_is_refused(before: str, after: list[str], said: str, tmp_path: Path) -> None:
    """The chart as a cluster renders it, where `lookup` finds what the first release has made."""
    old, new = rendered(before), rendered(*after)
    live = {f"{it['kind']}/{it['metadata']['name']}": it for it in old}
    for group in of_kind(old, "LeaderWorkerSet"):  # whose controller makes a Service
        name = group["metadata"]["name"]
        live[f"Service/{name}"] = {"spec": {"selector": {"leaderworkerset.sigs.k8s.io/name": name}}}
    shutil.copytree(CHART, tmp_path / "millrace")
    checks = tmp_path / "millrace" / "templates" / "_checks.tpl"
    text = checks.read_text()
    for call, name in LOOKUPS.items():
        assert text.count(call) == 1
        text = text.replace(call, f"index .root.Values.global.live (print {name}) | default dict")
    checks.write_text(text)
    (tmp_path / "live.yaml").write_text(yaml.safe_dump({"global": {"live": live}}))
    file, sets = VARIANTS.get(after[0], (CPU, ()))
    command = [*template_of(tmp_path / "millrace", file, (*sets, *after[1:])), "--values", str(tmp_path / "live.yaml")]
    with pytest.raises(ChartError, match=re.escape(said)) if said else nullcontext():
        run(command)
    immutable = any("spec.selector is immutable" in problem for problem in refused(old, new))
    assert immutable is any(kind in said for kind in ("Deployment", "component="))
