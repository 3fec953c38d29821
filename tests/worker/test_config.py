import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from millrace.v1 import worker_pb2
from millrace_common.config import ConfigError, OverCommitted, load
from millrace_serve.engine.config import Role
from millrace_serve.engine.start.phases import Phases
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.rank import process
from millrace_testing import HANG_S
from millrace_testing.inside import inside
from millrace_testing.paths import TINY
from millrace_testing.procs import SIM
from millrace_testing.reference_pages import settings

KEYS = re.findall(r"^\| `([a-z_.]+)` ", settings(WorkerConfig), re.MULTILINE)


def test_limit_can_be_set_without_the_others() -> None:
    config = load(WorkerConfig, None, ["role=decode", "engine=sim", "limits.max_running=3"])
    assert (config.role, config.limits.max_running, config.limits.max_model_len) == (Role.DECODE, 3, 8192)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["role=decode"], "^model: a checkpoint folder is required unless engine=sim$"),
        (["role=router", "engine=sim"], "role"),
        (["role=decode", "engine=sim", "limits.nonsense=1"], "limits.nonsense: unknown key"),
        (["engine=sim", "tp=2", "dp=2", "expert_tp=true"], "expert_tp: needs dp=1, not 2"),
        (["engine=sim", "tp=2", "limits.context_parallel_tokens=9"], "limits.context_parallel_tokens: needs dp > 1"),
        (["engine=sim", "dp=4", "limits.context_parallel_tokens=7"], "2 tokens per replica"),
        (["engine=sim", "tp=4", "dense_tp=3"], "dense_tp=3: must divide tp=4"),
        (["model=/models/v3", "limits.num_pages=auto"], "auto needs device=cuda and engine=model"),
        (["engine=sim", "device=cuda", "limits.num_pages=auto"], "auto needs device=cuda and engine=model"),
        (["engine=sim", "limits={page_size: 1, num_pages: 4}"], "limits.num_pages=4: must be at least 5 with"),
        (["engine=sim", "limits.max_model_len=4"], "limits.max_model_len: Input should be greater than or equal to 5"),
        (["engine=sim", "tp=32", "dp=32"], "dp=32: must be at most 16 with tp=32"),
        (["engine=sim", "sim.eos_lengths=[0, 8]"], "sim.eos_lengths.0: Input should be greater than or equal to 1"),
        (["engine=sim", "graphs=sometimes"], "^graphs: must be auto, on, off, or a list of batch sizes of at least 1"),
        (["engine=sim", "graphs=[0]"], "^graphs: must be auto, on, off, or a list"),
        (["engine=sim", "graphs=[]"], "^graphs: must be auto, on, off, or a list"),
        (["engine=sim", "graphs=[8, true]"], "^graphs: must be auto, on, off, or a list"),
        (["engine=sim", "memory_fraction=1.5"], "memory_fraction"),
        (
            ["engine=sim", "limits.checks=[canary, rot13]"],
            r"^limits.checks.1: Input should be 'checksum', 'canary' or 'poison'",
        ),
        (["engine=sim", "attention=[absorbed, expanded]"], "attention: absorbed and expanded exclude each other"),
        (["engine=sim", "attention=[flash_mla]"], "attention: flash_mla takes dtype=bfloat16, not float32"),
    ],
)
def test_mistakes_are_named(items: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(WorkerConfig, None, items)


@pytest.mark.parametrize("key", KEYS)
def test_no_value_of_a_setting_is_huge_or_ends_in_a_traceback(key: str) -> None:
    """`device=cuda` makes a plan of the raw values."""
    for base in (SIM, (f"model={TINY}", "device=cuda")):
        for value in (10**15, -1, ".inf", ".nan", "[]", "{1: 2}", "", '"\\ud800"', "2024-99-99"):
            try:
                accepted = load(WorkerConfig, None, [*base, f"{key}={value}"])
            except ConfigError as error:
                assert "\n" not in str(error)
            else:
                assert not {"-1", str(10**15)} & {*re.findall(r"-?\d+", accepted.model_dump_json())}, "it has no limit"


@pytest.mark.parametrize(
    ("setting", "value"), [("num_pages", "16777216"), ("host_cache_gib", "1048576"), ("num_pages", "4000000")]
)
def test_what_the_hosts_memory_cannot_hold_is_named(setting: str, value: str) -> None:
    config = load(WorkerConfig, None, [*SIM, "sim.page_kv_bytes=16777216", f"limits.{setting}={value}"])
    spec: Any = SimpleNamespace(config=config)
    with pytest.raises(OverCommitted, match=rf"limits\.{setting}=.* Set it to [0-9.]+ or less"):
        process._build(spec, Phases())


@pytest.mark.parametrize("limits", ["max_model_len: 5", "num_pages: 2", "num_pages: 5, page_size: 1, max_model_len: 5"])
async def test_smallest_sizes_are_enough_for_every_warm_up(limits: str) -> None:
    async with inside("prefill", "decode", sets=(*SIM, f"limits={{{limits}}}")) as (prefill, decode):
        await decode.stub.Warmup(worker_pb2.WarmupRequest(source=await prefill.source()), timeout=HANG_S)
        assert list((await decode.info()).warmed_sources) == [prefill.epoch]


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
