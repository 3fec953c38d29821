from __future__ import annotations

from pathlib import Path

import pytest
import torch
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_testing.checkpoint import write_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-bf16")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def random_fp8(random_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "fp8"
    export(random_bf16, folder)
    return folder
