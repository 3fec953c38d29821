from pathlib import Path

import pytest
from millrace_rpc.config import ConfigError, load
from millrace_serve.engine.config import Role
from millrace_serve.worker.config import WorkerConfig


def test_a_limit_can_be_set_without_the_others() -> None:
    config = load(WorkerConfig, None, ["role=decode", "engine=sim", "limits.max_running=3"])
    assert (config.role, config.limits.max_running, config.limits.max_model_len) == (Role.DECODE, 3, 8192)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["role=decode"], "a checkpoint folder is required"),
        (["role=router", "engine=sim"], "role"),
        (["role=decode", "engine=sim", "limits.nonsense=1"], "limits.nonsense: unknown key"),
        (["role=decode", "engine=sim", "dp=0"], "dp"),
        (["role=decode", "engine=sim", "timeouts.lease=-1"], "timeouts.lease"),
    ],
)
def test_mistakes_are_named(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(WorkerConfig, None, items)


def test_names() -> None:
    config = WorkerConfig(role=Role.PREFILL, model=Path("/models/v3"), dp=4, tp=2)
    assert config.model_name == "v3" and config.num_ranks == 8
