"""A lint of the two Dockerfiles, and whether what they start exists."""

import json
import re
from dataclasses import dataclass

import pytest
from millrace_chart.render import ROOT
from millrace_cli.cluster import SERVERS, TINY
from millrace_common.config import Config, load
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.charts import of_kind, pods, rendered

FILES = ("router/Dockerfile", "services/Dockerfile")
MODELS: dict[str, type[Config]] = {"millrace_router": RouterConfig, "millrace_serve.decode": WorkerConfig}


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str


def read(path: str) -> list[Instruction]:
    """Comments are gone and continued lines are joined."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in whole.splitlines()]


def texts(path: str, name: str) -> list[str]:
    return [one.text for one in read(path) if one.name == name]


@pytest.mark.parametrize("path", FILES)
def test_bases_are_pinned_and_stages_are_known(path: str) -> None:
    stages: set[str] = set()
    for text in texts(path, "FROM"):
        base, _, stage = text.partition(" AS ")
        known = base in stages or base == "base-${DEVICE}"
        assert known or re.search(r":\d+\.\d+\.\d+[-a-z0-9.]*@sha256:[0-9a-f]{64}$", base), f"{base}: no digest"
        stages.add(stage)
    assert len(stages) > 1, "one stage: compilers and caches would stay in the image"


def test_tag_has_one_digest_and_the_syntax_has_one() -> None:
    everything = "".join((ROOT / path).read_text() for path in FILES)
    found = re.findall(r"^(?:FROM |# syntax=)([^@\s]+:[^@\s]+)(?:@(\S+))?", everything, re.MULTILINE)
    digests = dict(found)
    assert len(digests) == 3 and all(digests[tag] == digest and digest for tag, digest in found)


@pytest.mark.parametrize("path", FILES)
def test_last_stage_is_somebody_and_has_no_tools_to_build(path: str) -> None:
    instructions = read(path)
    last = max(index for index, one in enumerate(instructions) if one.name == "FROM")
    final = instructions[last:]
    (user,) = (one.text for one in final if one.name == "USER")
    assert user == "10001:10001"
    assert not any("pip install" in one.text or "apt-get" in one.text for one in final)
    assert [one.name for one in final].count("CMD") == 1 and any(one.name == "HEALTHCHECK" for one in final)
    assert not any(one.name == "ADD" for one in instructions)


@pytest.mark.parametrize("path", FILES)
def test_installs_are_small_and_reproducible(path: str) -> None:
    for text in texts(path, "RUN"):
        for command in re.split(r"&&|;", text):
            if "pip install" in command:
                assert "--no-deps" in command, command
                assert "--require-hashes " in command or command.strip().endswith("--editable ."), command
        if "apt-get install" in text:
            assert "--no-install-recommends" in text and "rm -rf /var/lib/apt/lists/*" in text
    assert any("PIP_NO_CACHE_DIR=1" in text for text in texts(path, "ENV"))


@pytest.mark.parametrize("path", FILES)
def test_what_is_copied_is_there_and_not_ignored(path: str) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for text in texts(path, "COPY"):
        if not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
                inside = any(source == name or source.startswith(f"{name}/") for name in allowed)
                assert inside, source


@pytest.mark.parametrize("path", FILES)
def test_command_is_a_server_with_a_configuration_that_it_accepts(path: str) -> None:
    """And its probes ask the port that it opens."""
    (command,) = (json.loads(text) for text in texts(path, "CMD"))
    assert command[:2] == ["python3", "-m"] and command[2] in {module for module, *_ in SERVERS.values()}
    config = load(MODELS[command[2]], None, [word for word in command[3:] if word != "--set"])
    port = config.metrics_port if isinstance(config, WorkerConfig) else int(str(config.metrics).rpartition(":")[2])
    (probe,) = texts(path, "HEALTHCHECK")
    assert f":{port}/health" in probe
    (exposed,) = texts(path, "EXPOSE")
    assert str(port) in exposed.split()


def test_the_worker_image_has_the_load_client_and_no_other_bench() -> None:
    """With the router that it starts and whose tokenizer it uses."""
    folders = {text.split()[0] for text in texts("services/Dockerfile", "COPY")}
    assert {"bench/millrace_load", "router", "services", "kernels", "proto"} <= folders and "bench" not in folders
    for path in FILES:
        home = texts(path, "WORKDIR")[0]  # of the editable install
        assert texts(path, "COPY")[-1].split()[1] == f"{home}/{TINY.relative_to(ROOT)}", "commands look elsewhere"


def test_gpu_image_has_what_looks_at_a_network() -> None:
    """The runbook of slow transfers asks for ibv_devinfo, ibstat and ib_read_bw."""
    (install,) = (text for text in texts("services/Dockerfile", "RUN") if "apt-get install" in text)
    assert {"perftest", "ibverbs-utils", "infiniband-diags", "ibverbs-providers"} <= set(install.split())


@pytest.mark.helm
def test_charts_user_and_model_are_those_of_the_images() -> None:
    items = rendered("cpu-tiny")
    assert {spec["securityContext"]["runAsUser"] for _, spec in pods(items)} == {10001}
    model = next(item["data"]["config.yaml"] for item in of_kind(items, "ConfigMap") if "config.yaml" in item["data"])
    for path in FILES:
        (target,) = (text.split()[-1] for text in texts(path, "COPY") if "models/tiny" in text)
        assert f"model: {target}\n" in model
