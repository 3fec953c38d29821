"""NOTES.txt: its commands name objects that are there, and its warnings what was chosen."""

import re
import shutil
from pathlib import Path

import pytest
from millrace_chart.render import CHART, EDITED, NAMESPACE, RELEASE, run
from millrace_testing.charts import VARIANTS, rendered

pytestmark = pytest.mark.helm
AS_OBJECT = 'kind: Notes\nmetadata: {name: notes}\ntext: |\n  {{- tpl (.Files.Get "NOTES.txt") . | nindent 2 }}\n'


def notes(folder: Path, name: str) -> str:
    """As text of an object: `helm template` leaves them out."""
    chart = folder / "millrace"
    shutil.copytree(CHART, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "NOTES.txt")
    (chart / "templates" / "notes.yaml").write_text(AS_OBJECT)
    file, sets = VARIANTS[name]
    arguments = ["template", RELEASE, str(chart), "--namespace", NAMESPACE, "--kube-version", "1.31.0"]
    for item in (EDITED, *sets):
        arguments += ["--set", item]
    return run([*arguments, "--values", str(file), "--show-only", "templates/notes.yaml"])


@pytest.mark.parametrize("name", ["keys", "tls", "tcp", "privileged", "extended"])
def test_commands_name_what_is_there(name: str, tmp_path: Path) -> None:
    text = notes(tmp_path, name)
    there = {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in rendered(name)}
    named = set(re.findall(r"\b(?:deployment|service)/[a-z0-9-]+", text))
    assert named and named <= there
    assert f"helm test {RELEASE} -n {NAMESPACE}" in text
    encrypted = name in ("tls", "tcp", "privileged")  # the last two are presets for GPUs
    assert ("nothing is encrypted" in text) is not encrypted
    assert ("over TCP" in text) is (name == "tcp")
    assert ("worker pods are privileged" in text) is (name == "privileged")
    assert ("Authorization: Bearer" in text) is (name == "keys")
    assert ("curl --cacert ca.crt -sN https://" in text) is (encrypted and name != "tls"), (
        "its clients have certificates"
    )
    assert ("no pool was given" in text) is (name == "extended")
