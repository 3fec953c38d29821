"""Clients that cannot be installed beside our own packages, each in an environment of its own (make peers).

instructor wants an older rich, LiteLLM other versions of certifi and huggingface_hub, and 140 MB.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT
from router.harness import Cluster
from router.scripted import say
from router.text.test_parsers import v31

RUN_S = 120


async def run(made: Cluster, name: str, answers: list[str]) -> None:
    """The client's program ends without an error, and has asked as often as there are answers."""
    python = ROOT / "build" / "peers" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{name} is not installed (make peers)")
    for answer in answers:
        say(made, answer)
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    program = Path(__file__).parent / "peers" / f"{name}_client.py"
    process = await asyncio.create_subprocess_exec(
        python, program, made.url, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), RUN_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, said.decode()[-3000:]
    assert len(made.prefills[0].submitted) == len(answers)


@pytest.mark.long
async def test_instructor(serve: Callable) -> None:
    oslo = '{"name": "Oslo", "inhabitants": 700000}'
    calls = [v31((name, oslo)) for name in ("City", "PartialCity")]  # as instructor calls what it asks for
    texts, fenced = oslo, f"```json\n{oslo}\n```"
    await run(await serve("v31"), "instructor", [*calls, *calls, *[texts] * 4, *[fenced] * 2])


@pytest.mark.long
async def test_litellm(serve: Callable) -> None:
    oslo = '{"name": "Oslo"}'
    turns = ["Hello.", v31(("City", oslo)), "Hello."]
    await run(await serve("v31"), "litellm", [*[*turns, *turns, oslo] * 3, "Hello."])
