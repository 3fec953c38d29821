"""What pyproject.toml asks for, what requirements/ pins and what images install are the same, and can be resolved.

Resolvers read metadata alone: nothing is installed, and of a package of 500 MB only some kilobytes are fetched.
"""

import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = ROOT / "requirements"
# Lock → extras of pyproject.toml, device, and what the image gets in another way (services/Dockerfile says why)
LOCKS = {
    "router": (("kubernetes", "tracing"), "cpu", set()),
    "worker-cpu": (("cpu", "cluster", "tracing"), "cpu", {"torch"}),
    "worker-gpu": (("gpu", "cluster", "tracing"), "gpu", set()),
}
HERE = {name: str(value) for name, value in default_environment().items()}
IMAGE = HERE | {"python_version": "3.12", "python_full_version": "3.12.11", "sys_platform": "linux"}


@functools.cache
def project() -> dict[str, list[str]]:
    """Extra → requirements; "" is what is always needed."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def asked(*extras: str) -> Iterator[Requirement]:
    """What extras need, those that they refer to included."""
    for extra in ("", *extras):
        for line in project()[extra]:
            requirement = Requirement(line)
            if requirement.name == "millrace":
                yield from asked(*requirement.extras)
            else:
                yield requirement


def pins(path: Path) -> dict[str, str]:
    """Package → version, of a lock, or of constraints and those that they include."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("-c "):
            found |= pins(path.parent / line.removeprefix("-c "))
        elif line and not line.startswith(("#", " ")):
            name, _, version = line.partition("==")
            assert version, f"{path.name}: {line!r} is not pinned"
            found[canonicalize_name(name)] = version.split()[0]
    return found


def locked(name: str) -> dict[str, str]:
    return pins(REQUIREMENTS / f"{name}.lock")


def constrained(device: str) -> dict[str, str]:
    return pins(REQUIREMENTS / f"constraints-{device}.txt")


# ---------------------------------------------------------------------------------------------- without a network


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_what_its_extras_ask_for(name: str) -> None:
    extras, device, elsewhere = LOCKS[name]
    have = locked(name) | {one: constrained(device)[one] for one in elsewhere}
    for requirement in asked(*extras):
        if requirement.marker is None or requirement.marker.evaluate(IMAGE):
            version = have.get(canonicalize_name(requirement.name))
            assert version, f"{requirement.name}: not in {name}.lock (make locks)"
            assert requirement.specifier.contains(version), (
                f"{name}.lock: {requirement.name} {version} is not {requirement}"
            )


@pytest.mark.parametrize("name", ["build", *LOCKS])
def test_lock_has_the_versions_of_its_constraints_with_hashes(name: str) -> None:
    device = LOCKS[name][1] if name in LOCKS else "cpu"
    wanted = constrained(device) | pins(REQUIREMENTS / f"no-deps-{device}.txt")
    have = locked(name)
    assert have.items() <= wanted.items(), f"{dict(have.items() - wanted.items())}: not as constrained (make locks)"
    entries = re.split(r"\n(?=\S)", (REQUIREMENTS / f"{name}.lock").read_text().strip())
    for entry in entries:
        assert entry.startswith("#") or re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry


def test_torch_of_the_cpu_image_has_its_own_lock() -> None:
    text = (REQUIREMENTS / "torch-cpu.lock").read_text()
    assert locked("torch-cpu") == {"torch": f"{constrained('cpu')['torch']}+cpu"}
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", text)) == 1, "one Python on one machine"


@pytest.mark.parametrize("name", ["router", "worker-cpu"])
def test_lock_has_what_its_packages_ask_for(name: str) -> None:
    """As the packages say that are installed here, where those are of the same version."""
    _, device, elsewhere = LOCKS[name]
    have, exempt = locked(name), pins(REQUIREMENTS / f"no-deps-{device}.txt")
    read = 0
    for package, version in have.items() - exempt.items():
        try:
            here = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if here.version == version:
            read += 1
            needed = {canonicalize_name(one.name) for one in without_extras(here.requires or ())}
            assert needed <= have.keys() | elsewhere, f"{name}.lock: {package} needs {needed - have.keys()}"
    assert read > 0.8 * len(have), f"only {read} of {len(have)} packages are installed here in the lock's version"


def without_extras(lines: Iterable[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({**IMAGE, "extra": ""}):
            yield requirement


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_package_without_dependencies_is_in_no_extra_but_in_the_lock(device: str) -> None:
    """In an extra it would be resolved with its dependencies after all."""
    alone = pins(REQUIREMENTS / f"no-deps-{device}.txt")
    assert alone and alone.items() <= locked(f"worker-{device}").items()
    assert not alone.keys() & {canonicalize_name(one.name) for one in asked(device, "cluster", "tracing", "dev")}
    makefile, dockerfile = (ROOT / "Makefile").read_text(), (ROOT / "services" / "Dockerfile").read_text()
    assert "--no-deps --requirement requirements/no-deps-$(DEVICE).txt" in makefile
    assert '--no-deps --require-hashes --requirement "requirements/worker-${DEVICE}.lock"' in dockerfile


def test_ray_is_the_same_everywhere_and_here() -> None:
    versions = {constrained("cpu")["ray"], *(locked(f"worker-{device}")["ray"] for device in ("cpu", "gpu"))}
    assert versions == {importlib.metadata.version("ray")}


# ------------------------------------------------------------------------------------------------- with a network


def resolved(command: list[str], lines: Iterable[str], folder: Path) -> str | None:
    """-> what is wrong with the requirements, in the resolver's words; None: nothing."""
    (folder / "asked.txt").write_text("\n".join(lines))
    done = subprocess.run([*command, str(folder / "asked.txt")], capture_output=True, text=True, cwd=ROOT)
    return None if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips without a package index: one small package cannot be found then."""
    problem = resolved([*uv("cpu", "3.12"), "--no-cache"], ["iniconfig"], tmp_path_factory.mktemp("index"))
    if problem:
        pytest.skip(f"no package index can be asked: {problem.strip().splitlines()[0]}")


def uv(device: str, python: str) -> list[str]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--python-version", python]
    constraints = str(REQUIREMENTS / f"constraints-{device}.txt")
    return [*command, "--python-platform", "x86_64-manylinux_2_28", "--constraint", constraints]


def pip(device: str) -> list[str]:
    """With `fast-deps` it reads the metadata out of a package without the rest of it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    constraints = str(REQUIREMENTS / f"constraints-{device}.txt")
    return [*command, "--use-feature=fast-deps", "--no-input", "--constraint", constraints, "--requirement"]


@pytest.mark.long
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(("device", "python"), [("cpu", "3.11"), ("gpu", "3.12")])
def test_uv_resolves_what_make_setup_and_the_images_install(device: str, python: str, tmp_path: Path) -> None:
    problem = resolved(uv(device, python), map(str, asked(device, "cluster", "tracing", "dev")), tmp_path)
    assert problem is None, problem


@pytest.mark.long
@pytest.mark.usefixtures("index")
def test_pip_resolves_what_needs_a_gpu(tmp_path: Path) -> None:
    """The rest is resolved by `make setup`, which uses pip; it is left out because pip takes long for many packages."""
    base = {one.name for one in asked()}
    problem = resolved(pip("gpu"), (str(one) for one in asked("gpu") if one.name not in base), tmp_path)
    assert problem is None, problem


@pytest.mark.long
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("tool", [uv("gpu", "3.12"), pip("gpu")], ids=["uv", "pip"])
def test_flash_mla_cannot_be_an_ordinary_requirement(tool: list[str], tmp_path: Path) -> None:
    """Both refuse it beside the torch of this project. Once they do not, it belongs into extra gpu."""
    problem = resolved(tool, ("torch", "sgl-flash-mla==1.0.0"), tmp_path)
    assert problem is not None and re.search(r"unsatisfiable|ResolutionImpossible", problem), problem
