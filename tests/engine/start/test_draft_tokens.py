"""`draft_tokens` says whether the MTP layer is loaded and has its place in the KV page."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from millrace_serve.engine.config import Limits, Role
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY

CPU = torch.device("cpu")


def limits(draft_tokens: int) -> Limits:
    return Limits(num_pages=5, max_model_len=130, max_running=2, draft_tokens=draft_tokens)


def test_layer_is_loaded_and_in_the_page_where_it_is_used() -> None:
    layouts, main_layers = [], ModelConfig.load(TINY).num_hidden_layers
    for draft_tokens in (0, 1, 2):
        rank = load_rank(limits(draft_tokens), Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32)
        assert (rank.runner._model.mtp is not None) is (draft_tokens > 0)  # type: ignore[attr-defined]
        assert rank.pool.view().shape[1] == rank.pool.layout.num_layers == main_layers + (draft_tokens > 0)
        layouts.append(rank.pool.layout)
        rank.runner.close()
    assert layouts[1] == layouts[2]
    assert layouts[0].fingerprint != layouts[1].fingerprint
    assert layouts[0].page_bytes * (main_layers + 1) == layouts[1].page_bytes * main_layers


def test_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    shutil.copytree(TINY, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"draft_tokens=1: .*tiny has no MTP layer"):
        load_rank(limits(1), Role.UNIFIED, path, ParallelDims(), CPU, torch.float32)
