import functools
from pathlib import Path

import pytest
import torch
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_testing.checkpoint import write_checkpoint
from millrace_testing.int4 import write_int4
from model.checkpoints import InForm


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-bf16")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def in_form(tmp_path_factory: pytest.TempPathFactory) -> InForm:
    """A BF16 checkpoint in a quantised form, or as it is (""). Written once: no test changes its files."""

    @functools.cache
    def written(source: Path, form: str) -> Path:
        if not form:
            return source
        folder = tmp_path_factory.mktemp(source.name) / form
        if form == "int4":
            return write_int4(folder, source)
        export(source, folder, form)
        return folder

    return written


@pytest.fixture(scope="session")
def random_fp8(random_bf16: Path, in_form: InForm) -> Path:
    return in_form(random_bf16, "fp8")
