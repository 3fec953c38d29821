"""The commands of the guides, tried on renders: helm takes the values; what kubectl is to find is there."""

import itertools
import re
import shlex

import pytest
from millrace_chart.render import CHART, EDITED, KUBERNETES, NAMESPACE, ROOT, Object, objects, run
from millrace_testing.charts import NO_DASHBOARDS, of_kind, pods

pytestmark = pytest.mark.helm
PAGES = sorted(path for part in ("how-to", "platforms", "tutorials") for path in (ROOT / "docs" / part).glob("*.md"))
GUIDES = ("helm/millrace/README.md", "k8s/README.md", "README.md", *PAGES)
PLACEHOLDERS = ("POD", "NODE", "OLD", "NAME", "my-values.yaml", "my.yaml", "…")
KINDS = {"deployment": "Deployment", "service": "Service", "job": "Job", "secret": "Secret"}


def commands(word: str) -> list[str]:
    """Every command of the guides that begins with this word, in blocks (continued lines joined) and in the text."""
    found = []
    for guide in GUIDES:
        text = (ROOT / guide).read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        found += [line.strip() for line in (*lines, *spans) if line.strip().startswith(f"{word} ")]
    return sorted({command.partition("  #")[0].partition(" | ")[0] for command in found})


@pytest.fixture(scope="module")
def release() -> list[Object]:
    """The release `millrace` of the guides, with all that they speak of: groups, TLS, and a second set of pools."""
    arguments = ["template", "millrace", str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
    arguments += ["--set", NO_DASHBOARDS]
    groups = ["--values", str(ROOT / "tests" / "helm" / "groups.yaml"), "--set", f"{EDITED},tls.mode=certManager"]
    second = [f"workers.{role}-b.{item}" for role in ("prefill", "decode") for item in (f"role={role}", "revision=b")]
    return objects(run([*arguments, *groups])) + objects(run([*arguments, "--set", ",".join(second)]))


HELM = [c for c in commands("helm") if c.split()[1] in ("install", "upgrade", "template") and "helm/millrace" in c]


@pytest.mark.parametrize("command", [c for c in HELM if not any(word in c.split() for word in PLACEHOLDERS)])
def test_command_of_a_guide_is_taken_by_helm(command: str) -> None:
    words = shlex.split(command)
    name, chart = words[2:4]
    assert chart == "helm/millrace"
    rest, kept, skip = words[4:], [], False
    for word in rest:  # what `helm template` does not know
        if skip or word in ("--wait", "--create-namespace"):
            skip = False
        elif word == "--timeout":
            skip = True
        else:
            kept.append(str(ROOT / word) if word.endswith(".yaml") else word)
    assert run(["template", name, str(CHART), "--kube-version", KUBERNETES, *kept, "--set", NO_DASHBOARDS])


def test_there_are_commands_to_try() -> None:
    assert len(HELM) >= 4 and len(commands("kubectl")) >= 15


def test_objects_that_kubectl_is_to_find_are_there(release: list[Object]) -> None:
    names = {(item["kind"], item["metadata"]["name"]) for item in release}
    names |= {("Secret", item["spec"]["secretName"]) for item in of_kind(release, "Certificate")}
    named = {
        (KINDS[kind], name)
        for command in commands("kubectl")
        for kind, name in re.findall(rf"\b({'|'.join(KINDS)})[/ ](millrace-[-a-z0-9]+)", command)
    }
    assert len(named) >= 3 and named <= names


def test_labels_and_containers_that_kubectl_is_to_find_are_there(release: list[Object]) -> None:
    labels = {label for item in release for label in item["metadata"].get("labels", {})}
    containers = {
        c["name"] for _, spec in pods(release) for c in (*spec.get("initContainers", ()), *spec["containers"])
    }
    for command in commands("kubectl"):
        words = shlex.split(command)
        for flag, value in itertools.pairwise(words):
            if flag in ("-l", "-L", "--selector"):
                keys = {part.partition("=")[0].partition(" ")[0] for part in value.split(",")}
                assert keys <= labels, command
            if flag == "-c" and "exec" not in words[:2]:
                assert value in containers, command
