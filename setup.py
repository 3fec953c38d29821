"""What a wheel has beside the packages of pyproject.toml: the stubs of the .proto files, and the trained checkpoint.

It lacks millrace_bench, which measures a source tree.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "proto"


class Build(build_py):
    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages if name.split(".")[0] != "millrace_bench"]

    def run(self) -> None:
        from grpc_tools import protoc

        files = sorted(str(path) for path in PROTOS.glob("millrace/v1/*.proto"))
        outputs = [f"--{kind}_out={PROTOS}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{PROTOS}", *outputs, *files]):
            raise SystemExit("the stubs could not be generated")
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "models" / "tiny", Path(self.build_lib, "millrace_cli", "tiny"), dirs_exist_ok=True)


setup(cmdclass={"build_py": Build})
