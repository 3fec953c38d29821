"""Every file of examples/ runs as it is, against a system with the small model."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from millrace_chart.images import ROUTER, WORKERS
from millrace_chart.render import CHART, find_helm, objects, template
from millrace_cli import probe
from millrace_cli.cluster import ClusterSpec
from millrace_cli.process import Process
from millrace_testing import HANG_S
from millrace_testing.charts import of_kind
from millrace_testing.cluster import SMALL
from millrace_testing.inside_cluster import InsideCluster
from millrace_testing.paths import ROOT
from millrace_testing.prometheus import free_port

EXAMPLES = ROOT / "examples"
ANSWERS = {
    "chat_openai.py": "579",
    "messages_anthropic.py": "The capital of Norway is Oslo.",
    "generate_grpc.py": "17 29 42 63 88",
}
OTHERS = {"batch.sh", "batch.jsonl", "compose.yaml", "keda-values.yaml"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[dict[str, str]]:
    """The environment of an example."""
    async with InsideCluster(ClusterSpec(worker_set=SMALL)) as cluster:
        commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield os.environ | {"MILLRACE_URL": cluster.http_url, "MILLRACE_GRPC": cluster.grpc_address, "PATH": commands}


async def run(command: list[str], environment: dict[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 0
    return output.decode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ANSWERS)
async def test_script_prints_the_answer(name: str, system: dict[str, str]) -> None:
    assert (await run([sys.executable, str(EXAMPLES / name)], system)).strip() == ANSWERS[name]


@pytest.mark.asyncio(loop_scope="module")
async def test_batch_is_answered(system: dict[str, str], tmp_path: Path) -> None:
    output = await run([str(EXAMPLES / "batch.sh"), str(tmp_path / "answers.jsonl")], system)
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    }
    assert answers == {"sum": "579", "capital": ANSWERS["messages_anthropic.py"]}
    assert all(text in output for text in answers.values())


@pytest.mark.skipif(find_helm() is None, reason="no helm here: `make setup` could not install it (npm)")
def test_values_for_keda_scale_both_pools() -> None:
    items = objects(
        template((CHART / "presets/h200-4p-9d.yaml", EXAMPLES / "keda-values.yaml"), ("images.registry=r",))
    )
    scaled = {item["spec"]["scaleTargetRef"]["name"]: item["spec"] for item in of_kind(items, "ScaledObject")}
    assert {name.rpartition("-")[2]: spec["maxReplicaCount"] for name, spec in scaled.items()} == {
        "prefill": 4, "decode": 9
    }  # fmt: skip


@pytest.mark.long
async def test_services_of_the_compose_file_serve(tmp_path: Path) -> None:
    """Its commands as processes here; the images are those that `make images` builds."""
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    assert {one["image"] for one in services.values()} == {ROUTER.reference, WORKERS["cpu"].reference}
    ports: dict[str, str] = {}

    def here(argument: str) -> str:
        argument = argument.replace("/opt/millrace/models/tiny", str(ROOT / "models/tiny"))
        for port in ("50051", "50052", "50061", "50062", "8000", "9090", "9095", "9096"):
            if port in argument:
                argument = argument.replace(port, ports.setdefault(port, str(free_port())))
        return argument.replace("/tmp/millrace-cache", str(tmp_path / "cache"))

    async with contextlib.AsyncExitStack() as stack:
        for name, service in services.items():
            command = [sys.executable, *map(here, service["command"][1:])]
            process = Process(name, tmp_path, dict(os.environ))
            await process.start(command)
            stack.push_async_callback(process.stop, 10)
        address = f"127.0.0.1:{ports['50051']}"
        while not await probe.is_serving(address):
            await asyncio.sleep(0.2)
        asked = [sys.executable, str(EXAMPLES / "generate_grpc.py")]
        answer = await run(asked, os.environ | {"MILLRACE_GRPC": address})
        assert answer.strip() == ANSWERS["generate_grpc.py"]


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == ANSWERS.keys() | OTHERS
