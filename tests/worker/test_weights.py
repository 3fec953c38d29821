"""A worker that pauses, gets other weights, sleeps and wakes, as routers and trainers see it."""

import asyncio
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from engine.harness import request as engine_request
from engine.harness import said
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_serve.engine.config import Limits, Role
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import HANG_S
from millrace_testing.damages import POINTER
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.inside import inside, one
from millrace_testing.other_weights import write_other
from millrace_testing.paths import TINY
from millrace_testing.procs import SIM, Worker, gone, workers
from millrace_testing.shared import shared
from millrace_testing.sim import expected, prompt_of
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = (*SIM, "sim={step_s: 0.01}")
MODEL = (
    f"model={TINY}",
    "weights_root=/",
    "limits={num_pages: 129, max_model_len: 512, max_prefill_tokens: 128}",
    "dtype=float32",
)
PROMPTS = [[10 + (7 * i + n) % 500 for i in range(n)] for n in (3, 64, 200)]
ERROR = common_pb2.FINISH_REASON_ERROR


async def do(worker: Worker, action: str, **fields: Any) -> str:
    """The version of the weights afterwards. Raises MillraceError."""
    order = worker_pb2.SetWeightsRequest(action=f"WEIGHTS_ACTION_{action.upper()}", **fields)
    try:
        return (await worker.stub.SetWeights(order, timeout=HANG_S)).version
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


async def linked(worker: Worker) -> FakeLink:
    return FakeLink(worker, epoch=(await worker.info()).epoch)


async def answers(worker: Worker, cached: int | None = None) -> list[list[int]]:
    """Greedy tokens. `cached`: tokens of the longest prompt that must come from the prefix cache."""
    async with await linked(worker) as link:
        batch = [request(prompt, max_tokens=12) for prompt in PROMPTS]
        for one in batch:
            link.submit(one)
        for one in batch:
            await link.finish(one)
        if cached is not None:
            assert link.of(batch[-1])[0].cached_tokens == cached
        return [link.tokens(one) for one in batch]


# ------------------------------------------------------------------------------------- pauses, without a model


async def test_pause_keeps_sequences_and_a_resume_goes_on_with_them() -> None:
    """And its ranks say that they wait, so that their silence is taken for no hang (test_rank_watch.py)."""
    async with inside("unified", sets=(*SLOW, "dp=2")) as [worker], FakeLink(worker) as link:
        ours = [request(prompt_of(100), max_tokens=200) for _ in range(4)]
        for number, one in enumerate(ours):
            one.replica = number % 2
            link.submit(one)
        await asyncio.gather(*(link.first(one) for one in ours))
        await do(worker, "pause")
        steps = [r.counters["steps"] for r in (await worker.load()).replicas]
        late = request(prompt_of(10))
        link.submit(late)
        assert (await link.finish(late)).failure.reason == Reason.NOT_READY
        link.abort(ours[0])
        await link.finish(ours[0])  # messages are handled
        before = [len(link.tokens(one)) for one in ours]  # with those that were on their way
        while not all(rank.heartbeat.waiting for rank in worker.process.frontend.ranks.watch._ranks):
            await asyncio.sleep(0.01)
        load = await worker.load()
        assert load.state == worker_pb2.WORKER_STATE_PAUSED and all(r.paused for r in load.replicas)
        assert [r.counters["steps"] for r in load.replicas] == steps
        assert [len(link.tokens(one)) for one in ours] == before and max(before) < 200
        await do(worker, "pause")  # again: nothing happens
        await do(worker, "resume")
        for one in ours[1:]:
            await link.finish(one)
            assert link.tokens(one) == expected(list(one.token_ids), 200)
        await worker.whole()


async def test_pause_that_drops_fails_sequences_and_a_drain_does_not_wait() -> None:
    async with inside("unified", sets=SLOW) as [worker], FakeLink(worker) as link:
        one = await link.begun(request(prompt_of(100), max_tokens=500))
        await do(worker, "pause", drop=True)
        end = await link.finish(one)
        assert (end.finish_reason, end.failure.reason) == (ERROR, Reason.NOT_READY) and "paused" in end.failure.message
        await worker.whole()
        await do(worker, "resume")
        again = request(prompt_of(100), max_tokens=500)
        link.submit(again)  # the link has stayed
        await link.first(again)
        await do(worker, "pause")
        assert (await worker.stub.Drain(worker_pb2.DrainRequest(timeout_s=2 * HANG_S), timeout=HANG_S)).aborted == 1
        assert (await link.finish(again)).failure.reason == Reason.DRAINING


async def test_actions_in_the_wrong_order_are_refused() -> None:
    async with inside("unified", sets=(*SIM, "weights_root=/")) as [worker]:
        version = (await worker.info()).weights_version
        assert version and await worker.metric("millrace_worker_weights_info", version=version) == 1
        for action, fields in (("load", {"path": "/x"}), ("sleep", {}), ("wake", {})):
            with pytest.raises(MillraceError, match="pause it first") as caught:
                await do(worker, action, **fields)
            assert caught.value.reason is Reason.NOT_READY
        assert await do(worker, "resume") == version  # it serves already
        await do(worker, "pause")
        for fields, why in (
            ({}, "path must name"),
            ({"path": "/x"}, "a simulated engine has no weights"),
            ({"path": "/x", "version": "v" * 129}, "version has 129 characters; at most 128"),
        ):
            with pytest.raises(MillraceError, match=why) as caught:
                await do(worker, "load", **fields)
            assert caught.value.reason is Reason.INVALID_ARGUMENT
        with pytest.raises(MillraceError, match="action must be"):
            await do(worker, "unspecified")
        assert await do(worker, "resume") == version


async def test_sleep_ends_the_ranks_and_wake_starts_them_again(tmp_path: Path) -> None:
    async with inside("prefill") as [prefill], workers(tmp_path, "decode") as [decode]:
        both, ranks, epoch = (prefill, decode), decode.ranks(), decode.epoch
        prompt = prompt_of(300)
        async with FakePair(prefill, decode) as pair:
            one = pair.submit(request(prompt))
            await pair.to_decode.finish(one)
            await asyncio.gather(*(do(worker, "pause") for worker in both))
            await asyncio.gather(*(do(worker, "sleep") for worker in both))
            assert "sleep" in str(await pair.to_decode.end())
        await gone(ranks)
        assert (await decode.info()).state_message == "asleep" and not decode.ranks()
        assert await decode.metric("millrace_engine_total", what="output_tokens") >= 8, "of the ranks that ended"
        for action, fields in (("resume", {}), ("load", {"path": "/x"})):
            with pytest.raises(MillraceError, match="wake it first"):
                await do(decode, action, **fields)
        await do(decode, "sleep")
        await asyncio.gather(*(do(worker, "wake") for worker in both))
        loads = [load for worker in both for load in list((await worker.load()).replicas)]
        assert all(load.paused for load in loads), "a load may come before a resume"
        await asyncio.gather(*(do(worker, "resume") for worker in both))
        assert (await decode.info()).epoch != epoch
        await through(prefill, decode, prompt)
        assert await decode.metric("millrace_engine_total", what="output_tokens") > 8
        for action in ("pause", "sleep", "wake", "resume"):  # one side alone
            await do(prefill, action)
        await through(prefill, decode, prompt)
        await decode.whole()


async def through(prefill: Worker, decode: Worker, prompt: list[int]) -> None:
    """A prompt that the prefill worker has not cached."""
    source = await prefill.source()
    async with await linked(prefill) as to_prefill, await linked(decode) as to_decode:
        one = request(prompt)
        to_decode.submit(one, source)
        to_prefill.submit(one)
        await to_decode.finish(one)
        assert to_decode.tokens(one) == expected(prompt, 8) and to_prefill.of(one)[0].cached_tokens == 0


async def test_sleep_with_a_lease_ends_it_and_then_the_worker_stops() -> None:
    """Pages of a prompt are held for a decode worker that does not come."""
    async with inside("prefill", sets=(*SIM, "timeouts.lease=100")) as [worker]:
        async with FakeLink(worker) as link:
            await link.begun(request(prompt_of(300)))
            await do(worker, "pause")
            assert (await worker.load()).replicas[0].exporting == 1
            await do(worker, "sleep")
        await do(worker, "wake")
        await do(worker, "resume")
        await worker.whole()
        await do(worker, "pause")
        await do(worker, "sleep")
        await worker.close()
        assert worker.process.returncode == 0


# ------------------------------------------------------------------------------------- other weights, of a model


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_other(tmp_path_factory.mktemp("weights") / "step-2", seed=1)


@pytest.fixture(scope="module")
def references(other: Path) -> list[list[list[int]]]:
    """Answers of engines that have started with each checkpoint."""
    limits, found = Limits(num_pages=129, max_model_len=512, max_prefill_tokens=128), []
    for model in (TINY, other):
        rank = load_rank(limits, Role.UNIFIED, model, ParallelDims(), torch.device("cpu"), torch.float32)
        batch = [engine_request(room, prompt, max_tokens=12, ignore_eos=True) for room, prompt in enumerate(PROMPTS)]
        answers_of = said(rank.engine(), batch)
        found.append([[token for token, _ in answers_of[room]] for room in range(len(PROMPTS))])
    assert all(ours != theirs for ours, theirs in zip(*found, strict=True))
    return found


model = shared(lambda: one("unified", MODEL))  # with the weights of models/tiny


async def load(worker: Worker, path: Path, version: str = "") -> str:
    await do(worker, "pause")
    loaded = await do(worker, "load", path=str(path), version=version)
    return await do(worker, "resume") and loaded


async def test_load_changes_answers_version_and_all_names_of_the_weights(
    model: Worker, other: Path, references: list[list[list[int]]]
) -> None:
    """Prompts that are in the prefix cache with the old weights are computed again with the new ones."""
    assert await answers(model, cached=0) == references[0]
    assert await answers(model, cached=192) == references[0]
    before = await model.info()
    assert await load(model, other) == "step-2"
    after = await model.info()
    assert (after.weights_version, after.state) == ("step-2", worker_pb2.WORKER_STATE_READY)
    assert before.epoch != after.epoch and before.layout.fingerprint != after.layout.fingerprint
    assert before.layout.model != after.layout.model and before.worker_id != after.worker_id == after.epoch
    assert await model.metric("millrace_worker_weights_info", version="step-2") == 1
    assert await model.metric("millrace_worker_weights_info", version=before.weights_version) == 0
    assert await answers(model, cached=0) == references[1]
    assert await answers(model, cached=192) == references[1]
    assert await load(model, TINY, "step-1") == "step-1"
    assert await answers(model, cached=0) == references[0]
    await model.whole()


async def test_load_of_a_trainer_that_goes_away_ends_well(
    model: Worker, other: Path, references: list[list[list[int]]]
) -> None:
    await do(model, "pause")
    order = worker_pb2.SetWeightsRequest(action="WEIGHTS_ACTION_LOAD", path=str(other))
    call = model.stub.SetWeights(order)
    await asyncio.sleep(0.05)
    call.cancel()
    assert await do(model, "load", path=str(other), version="again") == "again"
    await do(model, "resume")
    assert await answers(model) == references[1]
    await load(model, TINY)


async def test_load_of_equal_weights_with_another_version_counts(model: Worker) -> None:
    fingerprints = set()
    for version in ("a", "b"):
        assert await load(model, TINY, version) == version
        fingerprints.add((await model.info()).layout.fingerprint)
    assert len(fingerprints) == 2


async def test_load_ends_what_the_pause_kept(model: Worker, references: list[list[list[int]]]) -> None:
    async with await linked(model) as link:
        one = await link.begun(request(PROMPTS[1], max_tokens=400))
        await load(model, TINY)
        end = await link.finish(one)
        assert (end.finish_reason, end.failure.reason) == (ERROR, Reason.NOT_READY)
        assert "weights tiny are being loaded" in end.failure.message
        stream_end = await link.end()
        assert stream_end is not None and "weights tiny" in stream_end.details()
    assert await answers(model, cached=0) == references[0]


async def test_load_of_a_checkpoint_that_does_not_fit_is_refused(
    model: Worker, other: Path, references: list[list[list[int]]], tmp_path: Path
) -> None:
    def write(name: str, file: str, change: Any) -> Path:
        shutil.copytree(other, tmp_path / name)
        change(tmp_path / name / file)
        return tmp_path / name

    def reshape(file: Path) -> None:
        save_file({name: tensor[:-1].contiguous() for name, tensor in load_file(file).items()}, file)

    def deeper(file: Path) -> None:
        file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))

    def ends(file: Path) -> None:
        file.write_text('{"eos_token_id": 7}')

    shards = sorted(path.name for path in other.glob("*.safetensors"))
    async with await linked(model) as link:
        kept = await link.begun(request(PROMPTS[0], max_tokens=400))
        epoch = (await model.info()).epoch
        await do(model, "pause")
        for path, why in (
            (tmp_path / "nothing", "config.json"),
            (write("shapes", shards[0], reshape), "has shape"),
            (write("config", "config.json", deeper), "rms_norm_eps=1e-05, not 1e-06"),
            (write("ends", "generation_config.json", ends), "not .1,."),
            (write("missing", shards[0], Path.unlink), "no such file or directory"),
        ):
            with pytest.raises(MillraceError, match=why) as caught:
                await do(model, "load", path=str(path))
            assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.param == "path"
        await do(model, "resume")
        assert (await model.info()).epoch == epoch
        await link.finish(kept)
    assert await answers(model) == references[0]


async def test_load_of_damaged_weights_leaves_the_old_ones(
    model: Worker, references: list[list[list[int]]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that is none is found when some weights are the new ones already: then only others end the pause."""
    damaged, nan = (Path(shutil.copytree(TINY, tmp_path / name)) for name in ("damaged", "nan"))
    shard = damaged / "model-00002-of-00003.safetensors"
    shard.write_bytes(POINTER)
    file = nan / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, file)
    await do(model, "pause")
    with pytest.raises(MillraceError) as caught:
        await do(model, "load", path=str(damaged))
    assert caught.value.reason is Reason.INVALID_ARGUMENT
    assert f"rank 0: {shard}: this is a Git LFS pointer" in caught.value.message
    await do(model, "resume")
    assert await answers(model) == references[0]
    await do(model, "pause")
    message = f"weights nan were not loaded: rank 0: {file}: tensor model.norm.weight has a NaN or an infinite number"
    for action, fields in (("load", {"path": str(nan)}), ("resume", {})):
        with pytest.raises(MillraceError, match=re.escape(message)):
            await do(model, action, **fields)
    assert (await model.info()).state_message == message
    await do(model, "load", path=str(TINY))
    await do(model, "resume")
    assert await answers(model) == references[0]
    assert "Traceback" not in caplog.text


@pytest.mark.long
async def test_pair_with_different_weights_is_refused_in_either_order(
    other: Path, references: list[list[list[int]]], tmp_path: Path
) -> None:
    """Workers of different versions do not pair, in either order; the prefill worker's cache is not read across."""
    async with workers(tmp_path, "prefill", "decode", sets=MODEL) as (prefill, decode):

        async def ask() -> list[list[int]]:
            source = await prefill.source()
            await decode.stub.Warmup(worker_pb2.WarmupRequest(source=source), timeout=HANG_S)
            async with await linked(prefill) as to_prefill, await linked(decode) as to_decode:
                batch = [request(prompt, max_tokens=12) for prompt in PROMPTS]
                for one in batch:
                    to_decode.submit(one, source)
                    to_prefill.submit(one)
                return [to_decode.tokens(one) for one in batch if await to_decode.finish(one)]

        async def refused() -> None:
            with pytest.raises(grpc.RpcError, match="KV layout"):
                await ask()

        assert await ask() == references[0]
        await load(prefill, other)
        await refused()
        await load(decode, other)
        assert await ask() == references[1]
        await load(decode, TINY, "step-3")
        await refused()
        await load(prefill, TINY, "step-3")
        assert await ask() == references[0]
        await asyncio.gather(prefill.whole(), decode.whole())


@pytest.mark.long
async def test_wake_has_the_weights_of_before_or_another_checkpoint(
    model: Worker, other: Path, references: list[list[list[int]]]
) -> None:
    await do(model, "pause", drop=True)
    assert await do(model, "load", path=str(TINY), version="tiny") == "tiny"
    for path, version, expected_version, reference in (
        ("", "", "tiny", 0),
        (str(other), "two", "two", 1),
        ("", "", "two", 1),
        (str(TINY), "", "tiny", 0),
    ):
        await do(model, "pause", drop=True)
        await do(model, "sleep")
        assert await do(model, "wake", path=path, version=version) == expected_version
        if not path:  # one more time over what it has
            await do(model, "load", path=str((TINY, other)[reference]), version=expected_version)
        await do(model, "resume")
        assert await answers(model, cached=0) == references[reference]
    await model.whole()


@pytest.mark.long
async def test_sleep_ends_the_profile(tmp_path: Path) -> None:
    """The ranks that wake are other processes."""
    folder, call = tmp_path / "traces", worker_pb2.StopProfileRequest()
    async with workers(tmp_path, "unified", sets=(*MODEL, f"profile_dir={folder}")) as [worker]:
        await worker.stub.StartProfile(worker_pb2.StartProfileRequest(), timeout=HANG_S)
        await do(worker, "pause")
        await do(worker, "sleep")
        (trace,) = folder.iterdir()
        with pytest.raises(grpc.RpcError, match="the ranks are not up"):
            await worker.stub.StartProfile(worker_pb2.StartProfileRequest(), timeout=HANG_S)
        await do(worker, "wake")
        assert list((await worker.stub.StopProfile(call, timeout=HANG_S)).paths) == [str(trace)]


@pytest.mark.long
async def test_tiers_find_pages_of_the_same_version_alone(
    other: Path, references: list[list[list[int]]], tmp_path: Path
) -> None:
    """Copies in the host's memory go; pages on disk are found again by the version that wrote them."""
    (tmp_path / "log").mkdir()
    tiers = ("limits.host_cache_gib=0.01", f"limits.disk_cache={tmp_path / 'kv'}", "limits.disk_cache_gib=0.1")
    async with workers(tmp_path / "log", "unified", sets=(*MODEL, *tiers)) as [worker]:
        assert await answers(worker, cached=0) == references[0]
        for path, version, cached, reference in (
            (TINY, "one", 0, 0),
            (other, "two", 0, 1),
            (TINY, "one", 192, 0),
            (other, "two", 192, 1),
        ):
            await load(worker, path, version)
            assert await answers(worker, cached) == references[reference]
            folders = {folder.name for folder in (tmp_path / "kv").iterdir()}
            assert (await worker.info()).layout.fingerprint in folders
            while (await worker.load()).replicas[0].host_pages_used < 4:
                await asyncio.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("dp=2", "redundant_experts=1"), ("tp=2",)])
async def test_load_changes_all_ranks(
    ranks: Sequence[str], other: Path, references: list[list[list[int]]], tmp_path: Path
) -> None:
    async with workers(tmp_path, "unified", sets=(*MODEL, *ranks)) as [worker]:
        assert await answers(worker) == references[0]
        await load(worker, other)
        assert await answers(worker) == references[1]
        await worker.whole()


@pytest.mark.gpu
@pytest.mark.timeout(1500)
async def test_gpu_graphs_take_other_weights_and_sleep_frees_memory(other: Path, tmp_path: Path) -> None:
    """Nobody else may use the GPU meanwhile: all its memory is counted."""
    sets, found = (*MODEL[1:], "device=cuda", "memory_fraction=0.12"), []
    free_before = torch.cuda.mem_get_info()[0]
    for checkpoint in (TINY, other):
        async with workers(tmp_path, "unified", sets=(f"model={checkpoint}", *sets), timeout_s=600) as [worker]:
            found.append(await answers(worker))
    assert all(ours != theirs for ours, theirs in zip(*found, strict=True))
    async with workers(tmp_path, "unified", sets=(f"model={TINY}", *sets), timeout_s=600) as [worker]:
        assert await answers(worker) == found[0]
        for path, reference in ((other, found[1]), (TINY, found[0])):
            await load(worker, path)
            assert await answers(worker, cached=0) == reference
        await do(worker, "pause")
        await do(worker, "sleep")
        assert torch.cuda.mem_get_info()[0] >= free_before - (64 << 20)
        await do(worker, "wake", path=str(other))
        await do(worker, "resume")
        assert await answers(worker) == found[1]
        assert await worker.metric("millrace_worker_compilations_total") == 0
