"""The trained checkpoint answers right through prefill -> decode: items of the task suite, with real processes."""

import json
import subprocess
import sys
from typing import Any

import pytest
from millrace_testing.paths import TINY

THRESHOLDS = {"addition": 0.95, "copy": 0.95, "retrieval_1k": 0.95, "sort": 0.90, "chat": 0.95}
ITEMS = 12  # of each: 0.95 means all of them, 0.90 all but one


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The command's, after a look at how many of all items went wrong."""
    command = [sys.executable, "-m", "millrace_bench.eval", "--self-serve", "pair", "--checkpoint", str(TINY)]
    options = ["--num-items", str(ITEMS), "--concurrency", "4", "--tasks", *THRESHOLDS]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])["results"]
    whole = record["all"]
    assert (whole["items"], whole["invalid"], whole["failed"]) == (ITEMS * len(THRESHOLDS), 0, 0)
    return record


@pytest.mark.long
@pytest.mark.parametrize("task", THRESHOLDS)
def test_accuracy(results: dict[str, Any], task: str) -> None:
    figures = results["tasks"][task]
    wrong = [one for one in results["wrong"] if one["item"].startswith(f"{task}[")]
    assert figures["accuracy"] >= THRESHOLDS[task], wrong
