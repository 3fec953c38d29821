"""What a process does before it imports anything else, at every place where one starts."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT

PACKAGES = ("proto", "kernels", "services", "router")
SHOW = """
import os, resource, signal
def show():
    handled = callable(signal.getsignal(signal.SIGTERM))
    print(*resource.getrlimit(resource.RLIMIT_CORE), os.environ.get("GRPC_VERBOSITY"), handled, flush=True)
    os._exit(0)
"""
# The first import of a package that is none of the standard library or of process_start.py.
AT_IMPORT = (
    SHOW
    + """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("millrace_") and name.partition(".")[2] not in ("", "__main__", "prefill", "decode",
            "prefill.__main__", "decode.__main__", "process_start"):
            show()
sys.meta_path.insert(0, Finder())
"""
)
ENTRIES = sorted(path for name in PACKAGES for path in (ROOT / name).glob("**/__main__.py"))


def shown(command: list[str], tmp_path: Path, at_import: str = "", **environment: str) -> list[str]:
    """The limits of a core dump, soft and hard, gRPC's verbosity, and whether SIGTERM has a handler."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("this machine allows no core dumps")
    (tmp_path / "sitecustomize.py").write_text(at_import)
    path = os.pathsep.join([str(tmp_path), *(str(ROOT / name) for name in PACKAGES)])
    inherited = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        ["sh", "-c", 'ulimit -S -c $(ulimit -H -c); exec "$@"', "sh", *command],  # preexec_fn is unsafe beside gRPC
        env={**inherited, "PYTHONPATH": path, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    return done.stdout.decode().split()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda path: path.parent.name)
def test_every_entry_point_prepares_before_it_imports(entry: Path, tmp_path: Path) -> None:
    package = next(ROOT / name for name in PACKAGES if entry.is_relative_to(ROOT / name))
    command = [sys.executable, "-m", ".".join(entry.parent.relative_to(package).parts)]
    assert shown(command, tmp_path, AT_IMPORT) == ["0", "0", "NONE", "True"]
    assert shown(command, tmp_path, AT_IMPORT, GRPC_VERBOSITY="INFO") == ["0", "0", "INFO", "True"]


def test_the_entry_points_are_those_of_the_processes() -> None:
    assert [path.parent.name for path in ENTRIES] == ["millrace_router", "millrace_cli", "decode", "prefill"]


PROCESSES = {
    "rank": """
from types import SimpleNamespace
from millrace_serve.worker.rank import process
process._serve = lambda *args: show()
config = SimpleNamespace(role="decode", log_level="INFO", secret=None)
process.run(SimpleNamespace(config=config, rank=0, frontend="inproc://none", group=""))
""",
    "child for grammars": """
import sys
from millrace_common.grammar import child
sys.argv = ["-c", str(4 << 30)]
child._serve = show
child.main()
""",
}


@pytest.mark.parametrize("name", PROCESSES)
def test_what_inherits_nothing_leaves_no_core_dump(name: str, tmp_path: Path) -> None:
    assert shown([sys.executable, "-c", SHOW + PROCESSES[name]], tmp_path)[:2] == ["0", "0"]


def test_a_pods_script_leaves_no_core_dump(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(SHOW + "show()")
    script = str(ROOT / "helm/millrace/files/start.sh")
    # its first act empties /dev/shm, which others use here: `find` is replaced by a command that does nothing
    (tmp_path / "find").symlink_to("/bin/true")
    environment = {
        "MILLRACE_RUN": str(tmp_path),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    assert shown(["/bin/sh", script, "run", "probe"], tmp_path, **environment)[:2] == ["0", "0"]
