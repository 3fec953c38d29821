"""Processes that compile beside a start: how many, what they run, and that whatever becomes of them ends no start."""

import dataclasses
import logging
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from millrace_serve.engine.cache.kv_pool import KvLayout
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.start import compile_ahead
from millrace_serve.engine.start.compile_ahead import (
    CompilePart,
    beside,
    fingerprint,
    mark,
    num_processes,
    parts,
    turned,
)
from millrace_serve.engine.start.startup import RankSetup
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY

LIMITS = Limits(num_pages=9, max_model_len=130, max_running=3, max_prefill_tokens=96)
CPU = torch.device("cpu")
ROOMY = 1 << 40
READS = "import sys; sys.stdin.buffer.read(1); "


def setup(device: str = "cpu", role: Role = Role.UNIFIED, cache_dir: Path | None = None, drafts: int = 0) -> RankSetup:
    model = ModelConfig.load(TINY)
    model = model if drafts else model.without_mtp()
    layout = KvLayout(
        page_size=64,
        num_layers=model.num_kv_layers,
        dtype="float32",
        latent_width=model.kv_lora_rank,
        rope_width=model.qk_rope_head_dim,
        model_hash="of a checkpoint",
    )
    dims = ParallelDims(rank=1, tp=2)
    execution = Execution.model_validate({"graphs": "on", "cache_dir": cache_dir})
    limits = LIMITS.model_copy(update={"draft_tokens": drafts})
    return RankSetup(role, limits, execution, model, layout, dims, torch.device(device), torch.float32)


def told(count: int) -> list[CompilePart]:
    return [CompilePart(setup(), index, count, ROOMY) for index in range(count)]


def doing(code: str) -> list[str]:
    return [sys.executable, "-c", READS + code]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a device that is there by name only."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("cores", "room", "count"),
    [(16, 100, 8), (3, 100, 3), (16, 59, 5), (16, 19, 0), (16, -5, 0), (1, 100, 0)],
)
def test_cores_and_memory_limit_the_processes(cores: int, room: int, count: int) -> None:
    assert num_processes(cores, room, least=10) == count


def test_processes_begin_apart_and_do_everything() -> None:
    assert [turned("abcdefg", i, 3) for i in range(3)] == [list("abcdefg"), list("cdefgab"), list("efgabcd")]
    assert turned([], 1, 2) == []


@pytest.mark.parametrize(("dense", "kinds"), [(1, "DEE"), (2, "DEE"), (0, "EEE"), (9, "DDD")])
def test_small_model_has_every_kind_of_layer(dense: int, kinds: str) -> None:
    changed = setup().model.model_copy(update={"first_k_dense_replace": dense})
    model = compile_ahead.small_model(dataclasses.replace(setup(), model=changed))
    assert "".join("E" if isinstance(layer.mlp, Moe) else "D" for layer in model.layers) == kinds
    assert model.layers[2].mlp is model.layers[1].mlp and model.mtp is None
    assert [layer.sampled_only for layer in model.layers] == [False, False, True]
    assert model.heads.num_heads == changed.num_attention_heads // 2


@pytest.mark.parametrize(("role", "drafts"), [(Role.PREFILL, 0), (Role.UNIFIED, 2)])
def test_part_runs_every_step_beginning_elsewhere(role: Role, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    ran: list[list[int]] = []
    drafted = []
    forward_mtp = compile_ahead.DeepseekV3.forward_mtp
    monkeypatch.setattr(
        compile_ahead.DeepseekV3, "forward_mtp", lambda *args: (drafted.append(1), forward_mtp(*args))[1]
    )
    launch = compile_ahead.TorchRunner.launch

    # type: ignore[no-untyped-def]
    def recorded(runner: compile_ahead.TorchRunner, batch: compile_ahead.profiling_run.StepBatch):
        ran[-1].append(batch.num_tokens)
        return launch(runner, batch)

    monkeypatch.setattr(compile_ahead.TorchRunner, "launch", recorded)
    for index in range(2):
        ran.append([])
        compile_ahead.run(CompilePart(setup(role=role, drafts=drafts), index, 2, ROOMY))
    first, second = ran
    assert first != second and sorted(first) == sorted(second)
    assert max(first) == 98 + 2 * drafts and (role is Role.PREFILL or first.count(3 * (1 + drafts)) > 2)
    assert (len(drafted) > 2 * len(first)) is (drafts > 0)


def test_what_decides_over_kernels_is_in_the_fingerprint() -> None:
    one, name = setup(), "a GPU"
    same = (
        dataclasses.replace(one, limits=LIMITS.model_copy(update={"num_pages": "auto"})),
        dataclasses.replace(one, dims=ParallelDims(rank=0, tp=2)),
        dataclasses.replace(one, layout=msgspec.structs.replace(one.layout, model_hash="of another")),
    )
    others = (
        dataclasses.replace(one, limits=LIMITS.model_copy(update={"max_prefill_tokens": 97})),
        dataclasses.replace(one, dims=ParallelDims(rank=1, tp=4)),
        dataclasses.replace(one, layout=msgspec.structs.replace(one.layout, dtype="float8_e4m3fn")),
        dataclasses.replace(one, execution=Execution.model_validate({"graphs": [2]})),
        dataclasses.replace(one, execution=Execution.model_validate({"graphs": "on", "chunk_graph_tokens": 40})),
        dataclasses.replace(one, role=Role.PREFILL),
    )
    assert {fingerprint(other, name) for other in same} == {fingerprint(one, name)}
    prints = [fingerprint(other, name) for other in (one, *others)] + [fingerprint(one, "another GPU")]
    assert len(set(prints)) == len(prints)


def test_nothing_is_started_where_everything_is_compiled(cache: Path) -> None:
    there = setup("cuda:0", cache_dir=cache)
    assert len(parts(there, ROOMY)) == 8 and parts(there, 0) == []
    mark(there)
    assert parts(there, ROOMY) == []
    assert [len(parts(setup("cuda:0", role, cache), ROOMY)) for role in Role] == [0] * len(Role)
    assert len(parts(dataclasses.replace(there, limits=LIMITS.model_copy(update={"max_running": 2})), ROOMY)) == 8
    assert len(list((cache / "complete").iterdir())) == len(Role)


def test_processes_share_the_room_and_talk_to_nobody(cache: Path) -> None:
    group = object()
    dims = ParallelDims(rank=1, tp=2, tp_group=group, world_group=group)  # type: ignore[arg-type]
    those = parts(dataclasses.replace(setup("cuda:0", cache_dir=cache), dims=dims), 16 << 30)
    assert [(part.index, part.count) for part in those] == [(i, 5) for i in range(5)]
    assert all(5 * (part.num_bytes + (1 << 30)) <= 16 << 30 for part in those)
    assert {part.setup.dims for part in those} == {ParallelDims(rank=1, tp=2)}


def test_step_without_memory_is_left_to_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    run = compile_ahead.TorchRunner._run

    # type: ignore[no-untyped-def]
    def short(runner: compile_ahead.TorchRunner, batch: compile_ahead.profiling_run.StepBatch, slot: int):
        tokens.append(batch.num_tokens)
        if batch.num_tokens > 90:
            raise torch.OutOfMemoryError
        return run(runner, batch, slot)

    monkeypatch.setattr(compile_ahead.TorchRunner, "_run", short)
    compile_ahead.run(CompilePart(setup(), 0, 2, ROOMY))
    assert max(tokens[:-1]) > 90 and 0 < tokens[-1] <= 3


def test_one_role_does_not_speak_for_the_others(cache: Path) -> None:
    mark(setup("cuda:0", Role.PREFILL, cache))
    assert [len(parts(setup("cuda:0", role, cache), ROOMY)) for role in Role] == [0, 8, 8, 8]


def test_cpus_and_starts_without_a_cache_folder_have_none(cache: Path) -> None:
    for one in (setup("cpu", cache_dir=cache), setup("cuda:0")):
        assert parts(one, ROOMY) == []
        mark(one)
    assert not cache.exists()


def test_start_waits_for_all_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = f"import os, time; time.sleep(0.2); open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w')"
    with beside(setup(), told(3), doing(code)):
        pass
    assert len(list(tmp_path.iterdir())) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_of_ranks_with_one_cache_folder_the_first_has_them(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = setup("cuda:0", cache_dir=cache), setup("cuda:1", cache_dir=cache)
    with caplog.at_level(logging.INFO), beside(first, told(2), doing("")), beside(second, told(2), doing("")):
        pass
    assert caplog.text.count("compiled ahead processes=2") == 1
    with caplog.at_level(logging.INFO), beside(second, told(2), doing("")):
        pass
    assert caplog.text.count("compiled ahead processes=2") == 2, "the first one's are over"


def test_cache_folder_that_cannot_be_written_is_no_error(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file")
    with beside(setup("cuda:0", cache_dir=cache), told(2), doing("")):
        pass
    mark(setup("cuda:0", cache_dir=cache))
    assert "cannot compile ahead: NotADirectoryError" in caplog.text


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit('first\\nno compiler')", "2 of 2 processes that compile ahead failed: exit code 1: no compiler"),
        ("import signal; signal.raise_signal(9)", "2 of 2 processes that compile ahead failed: exit code -9: "),
    ],
)
def test_failures_are_named_once(code: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with beside(setup(), told(2), doing(code)):
        pass
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [said]


def test_one_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with beside(setup(), told(1), doing("import time; time.sleep(600)"), limit_s=0):
        pass
    assert "1 of 1 processes that compile ahead failed: it took too long" in caplog.text


def test_command_that_is_not_there_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with beside(setup(), told(2), ["/no/such/python"]):
        pass
    assert "cannot compile ahead: FileNotFoundError" in caplog.text


def test_processes_are_told_which_gpu_the_current_one_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They failed in torch.cuda.set_device when an engine was built for a "cuda" without an index."""
    started = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (ROOMY, ROOMY))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(compile_ahead, "beside", started)
    execution = Execution.model_validate({"cache_dir": cache})
    with pytest.raises(InterruptedError):
        load_rank(
            LIMITS, Role.UNIFIED, TINY, ParallelDims(), torch.device("cuda"), torch.bfloat16, execution=execution
        ).engine()
    _, wanted = started.call_args.args
    assert len(wanted) == 8 and {part.setup.device for part in wanted} == {torch.device("cuda", 1)}


def test_they_end_when_the_weights_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = compile_ahead.subprocess.Popen

    def remembered(*args: object, **options: object):  # type: ignore[no-untyped-def]
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(compile_ahead.subprocess, "Popen", remembered)
    with pytest.raises(OSError, match="no disk"), beside(setup(), told(2), doing("import time; time.sleep(600)")):
        raise OSError("no disk")
    assert [process.returncode for process in started] == [-9, -9]


def test_they_end_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What their stdin is to them: a pipe that closes."""
    (stdin, write), read, codes = os.pipe(), os.read, list[int]()
    os.close(write)
    monkeypatch.setattr(os, "read", lambda fd, count: read({0: stdin}[fd], count))
    monkeypatch.setattr(os, "_exit", codes.append)
    compile_ahead._end_with_parent()
    os.close(stdin)
    assert codes == [1]


@pytest.mark.long
def test_rank_starts_beside_a_process_that_runs_its_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(compile_ahead, "parts", lambda setup, room: [CompilePart(setup, 0, 1, ROOMY)])
    with caplog.at_level(logging.INFO):
        engine = load_rank(LIMITS, Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32).engine()
    engine.close()
    messages = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("compiled ahead processes=1") for message in messages)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], messages
