import re
from pathlib import Path

import pytest
from millrace_common.config import ConfigError, load
from millrace_serve.engine.config import Role
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.paths import TINY


def test_limit_can_be_set_without_the_others() -> None:
    config = load(WorkerConfig, None, ["role=decode", "engine=sim", "limits.max_running=3"])
    assert (config.role, config.limits.max_running, config.limits.max_model_len) == (Role.DECODE, 3, 8192)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["role=decode"], "^model: a checkpoint folder is required unless engine=sim$"),
        (["role=router", "engine=sim"], "role"),
        (["role=decode", "engine=sim", "limits.nonsense=1"], "limits.nonsense: unknown key"),
        (["role=decode", "engine=sim", "dp=0"], "dp"),
        (["engine=sim", "tp=2", "dp=2", "expert_tp=true"], "expert_tp: needs dp=1, not 2"),
        (["engine=sim", "tp=2", "limits.context_parallel_tokens=9"], "limits.context_parallel_tokens: needs dp > 1"),
        (["engine=sim", "dp=4", "limits.context_parallel_tokens=7"], "2 tokens per replica"),
        (["engine=sim", "tp=4", "dense_tp=3"], "dense_tp=3: must divide tp=4"),
        (["role=decode", "engine=sim", "timeouts.lease=-1"], "timeouts.lease"),
        (["model=/models/v3", "limits.num_pages=auto"], "auto needs device=cuda and engine=model"),
        (["engine=sim", "device=cuda", "limits.num_pages=auto"], "auto needs device=cuda and engine=model"),
        (["engine=sim", "limits.num_pages=1"], "limits.num_pages"),
        (["engine=sim", "graphs=sometimes"], "^graphs: must be auto, on, off, or a list of batch sizes of at least 1"),
        (["engine=sim", "graphs=[0]"], "^graphs: must be auto, on, off, or a list"),
        (["engine=sim", "graphs=[]"], "^graphs: must be auto, on, off, or a list"),
        (["engine=sim", "graphs=[8, true]"], "^graphs: must be auto, on, off, or a list"),
        (["engine=sim", "kv_dtype=int4"], "kv_dtype"),
        (["engine=sim", "memory_fraction=1.5"], "memory_fraction"),
        (
            ["engine=sim", "limits.checks=[canary, rot13]"],
            r"^limits.checks.1: Input should be 'checksum', 'canary' or 'poison'",
        ),
        (["engine=sim", "attention=[fa4]"], "attention"),
        (["engine=sim", "attention=[absorbed, expanded]"], "attention: absorbed and expanded exclude each other"),
        (["engine=sim", "attention=[flash_mla]"], "attention: flash_mla takes dtype=bfloat16, not float32"),
    ],
)
def test_mistakes_are_named(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(WorkerConfig, None, items)


def test_sizes_follow_from_the_device() -> None:
    def sizes(*items: str) -> tuple[int | str, int]:
        limits = load(WorkerConfig, None, items).limits
        return limits.num_pages, limits.max_running

    assert sizes("model=/models/v3") == sizes("engine=sim", "device=cuda") == (1025, 64)
    assert sizes(f"model={TINY}", "device=cuda") == ("auto", 192)
    assert sizes("model=/models/v3", "device=cuda", "limits.max_running=3") == ("auto", 3)
    config = load(WorkerConfig, None, ["model=/models/v3", "device=cuda", "limits.num_pages=77"])
    assert config.limits.num_pages == 77 and config.limits.resolved(77).usable_pages == 76


@pytest.mark.parametrize(("written", "means"), [("on", "on"), ("off", "off"), ("auto", "auto")])
def test_on_and_off_are_words_here(written: str, means: str) -> None:
    assert load(WorkerConfig, None, ["engine=sim", f"graphs={written}"]).graphs == means


def test_names() -> None:
    config = WorkerConfig(role=Role.PREFILL, model=Path("/models/v3"), dp=4, tp=2)
    assert config.model_name == "v3" and config.num_ranks == 8


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.1.2.3", "fd00::1", "worker.example.org"])
def test_port_that_others_reach_needs_a_secret_or_mutual_tls(host: str) -> None:
    tls = {"cert": "c", "key": "k"}
    for few in ({}, {"tls": tls}):
        with pytest.raises(ValueError, match=rf"secret: required with host={re.escape(host)}, or mutual TLS"):
            WorkerConfig(engine="sim", host=host, **few)
    for enough in ({"secret": "s"}, {"tls": {**tls, "ca": "a", "require_client_cert": True}}):
        assert WorkerConfig(engine="sim", host=host, **enough).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_port_of_this_machine_alone_needs_nothing(host: str) -> None:
    assert WorkerConfig(engine="sim", host=host).secret is None
