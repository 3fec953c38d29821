"""The wheel has what a source tree has, and serves by itself."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT

NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")  # without what they declare: the simulator needs no torch
PAGE = "millrace_router/admin/page/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git has, without generated files."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = ("proto/", "kernels/", "services/", "router/", "bench/", "models/tiny/")
    for name in filter(None, listed.split("\0")):
        if name.startswith(wanted) or "/" not in name:
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(folder / "tree")], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_it_has_what_serves_and_of_the_benches_the_load_client(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if name.endswith(".py")} - {"millrace"}
    assert {"millrace/v1/inference_pb2_grpc.py", "millrace_cli/gpus.yaml"} <= {*names}
    assert {f"{package}/py.typed" for package in packages} <= {*names}, packages
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "millrace_load" in packages and not any(name.startswith("millrace_bench") for name in names)
    for source, there in (("models/tiny", "millrace_cli/tiny/"), (f"router/{PAGE}", PAGE)):
        assert {path.name for path in (ROOT / source).iterdir()} == {
            name.rpartition("/")[2] for name in names if name.startswith(there)
        }


def until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"gRPC +(\S+)", line):
            return found[1]
    raise AssertionError("".join(said))


@pytest.fixture
def environment(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "environment"
    install = [str(Path(sys.executable).with_name("uv")), "pip", "install", "-q", "--python", str(folder)]
    subprocess.run([install[0], "venv", "-q", str(folder), "--python", sys.executable], check=True)
    for packages in ([str(wheel), "numpy"], ["--no-deps", *NIXL]):
        subprocess.run([*install, *packages], check=True)
    yield folder / "bin"


@pytest.mark.long
def test_alone_in_an_environment_it_serves_the_simulator(environment: Path, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ports = [f"--{name}-port=0" for name in ("grpc", "http", "admin", "admin-http")]
    command = [str(environment / "millrace"), "serve-local", "--engine", "sim", "--log-dir", str(tmp_path), *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean, cwd=tmp_path) as process:
        try:
            ask = [str(environment / "millrace"), "generate", "--json", "--max-tokens", "4"]
            answer = subprocess.run(
                [*ask, "--address", until_ready(process), "Hello"],
                env=clean, cwd=tmp_path, capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert '"token_ids": [' in answer.stdout
        finally:
            process.terminate()
