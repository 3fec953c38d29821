"""Pauses, loads, sleeps and wakes over scripted ranks: failures, orders and races."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import Load, Pause
from millrace_serve.worker.config import WorkerConfig, WorkerTimeouts
from millrace_serve.worker.frontend.lifecycle import Lifecycle, State
from millrace_serve.worker.frontend.load import LoadBoard
from millrace_serve.worker.frontend.weights import HotWeights
from millrace_serve.worker.messages import SetWeights


class Ranks:
    """`errors`: of the next calls of `set_weights`. `says`: what comes of a pause; a test may say it later itself."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.orders, self.sent = [*errors], list[SetWeights](), list[Pause]()
        self.info = None
        self.says: Callable[[bool], None] = lambda paused: None

    async def set_weights(self, order: SetWeights) -> str:
        self.orders.append(order)
        return self.errors.pop(0)

    def send(self, replica: int, message: Pause) -> None:
        self.sent.append(message)
        self.says(message.on)


class ScriptedFrontend:
    """Of a worker that is READY. `calls` gets what was called beside the ranks; `starts` may raise."""

    def __init__(self, ranks: Ranks, starts: Callable[[], None] = lambda: None) -> None:
        self.calls: list[str] = []
        self.config = WorkerConfig(engine="sim", weights_root="/")
        self.ranks, self.starts, self.version = ranks, starts, ""
        self.lifecycle = Lifecycle(lambda state: None)
        self.lifecycle.advance(State.READY, "")
        self.board = LoadBoard(1, "e", worker_pb2.LoadSnapshot)
        ranks.says = self.says
        self.requests = SimpleNamespace(check_admission=lambda: None)
        self.show_version = lambda: None

    def says(self, paused: bool) -> None:
        self.board.update(0, Load(paused=paused))

    async def forget(self, why: str) -> None:
        self.calls.append(why)

    async def start_ranks(self, path: Path | None) -> None:
        self.calls.append(f"start {path}")
        self.starts()

    async def stop_ranks(self) -> None:
        self.calls.append("stop")


async def paused(ranks: Ranks, starts: Callable[[], None] = lambda: None) -> tuple[HotWeights, ScriptedFrontend]:
    frontend: Any = ScriptedFrontend(ranks, starts)
    weights = HotWeights(frontend)
    await weights.pause(drop=False)
    return weights, frontend


async def test_load_that_fails_half_way_keeps_the_worker_out_until_another() -> None:
    ranks = Ranks("", "rank 1: OSError: the file ends", "", "")
    weights, frontend = await paused(ranks)
    life = frontend.lifecycle
    with pytest.raises(MillraceError, match="weights two were not loaded: rank 1: OSError") as caught:
        await weights.load("/checkpoints/two", "")
    assert caught.value.reason is Reason.INTERNAL
    assert life.state is State.PAUSED and "weights two were not loaded" in life.message
    with pytest.raises(MillraceError, match="load weights first: weights two were not loaded"):
        await weights.resume()
    await weights.load("/checkpoints/two", "2b")
    assert [(order.version, order.check) for order in ranks.orders] == [
        ("two", True), ("two", False), ("2b", True), ("2b", False)
    ]  # fmt: skip
    await weights.resume()
    assert (life.state, life.message, frontend.version) == (State.READY, "", "2b")
    assert frontend.calls == ["weights two are being loaded", "weights 2b are being loaded"]
    assert ranks.sent == [Pause(True), Pause(False)]


async def test_pause_soon_behind_a_resume_waits_for_its_own_end_of_steps() -> None:
    """The engine's latest report may be from the first pause: one that goes on says so only with its next step."""
    ranks = Ranks()
    weights, frontend = await paused(ranks)
    ranks.says = lambda paused: None
    await weights.resume()
    again = asyncio.create_task(weights.pause(drop=False))
    for says in (False, True):
        for _ in range(20):
            await asyncio.sleep(0)
        assert not again.done()
        frontend.says(says)
    await again
    assert frontend.lifecycle.state is State.PAUSED and ranks.sent == [Pause(True), Pause(False), Pause(True)]


async def test_check_that_fails_touches_nothing() -> None:
    weights, frontend = await paused(Ranks("rank 0: no config.json"))
    with pytest.raises(MillraceError, match=r"cannot be loaded: rank 0: no config\.json"):
        await weights.load("/x", "")
    await weights.resume()
    assert frontend.lifecycle.state is State.READY and frontend.calls == []


@pytest.mark.parametrize("action", ["load", "wake"])
async def test_only_checkpoints_below_the_root_are_read(tmp_path: Path, action: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-2"
    for folder in (root / "one", outside):
        folder.mkdir(parents=True)
    (root / "escape").symlink_to(outside)
    (root / "latest").symlink_to(root / "one")
    (root / "loop").symlink_to(root / "loop")
    (tmp_path / "entry").symlink_to(root)
    ranks = Ranks(*["no"] * 3)
    weights, frontend = await paused(ranks)
    frontend.config = WorkerConfig(engine="sim", weights_root=tmp_path / "entry")
    if action == "wake":
        await weights.sleep()
        ranks.errors[:] = [""] * 3
    for path in ("/etc", outside, root / "escape", root / "one" / ".." / ".." / "root-2", "root/one", "/x\0y"):
        with pytest.raises(MillraceError, match=r"(?s)path .* is not below weights_root") as caught:
            await getattr(weights, action)(str(path), "")
        assert caught.value.param == "path" and caught.value.reason is Reason.INVALID_ARGUMENT
    assert ranks.orders == [] and not any("start" in call for call in frontend.calls)
    with contextlib.suppress(MillraceError):  # the ranks say no
        await getattr(weights, action)(str(root / "latest"), "")
    read = ranks.orders[0].path if action == "load" else frontend.calls[-1].removeprefix("start ")
    assert read == str(root / "one"), "a link that is moved afterwards changes nothing"


async def test_root_is_the_folder_of_the_model_unless_it_is_configured() -> None:
    assert WorkerConfig(model=Path("/models/v3")).checkpoints == Path("/models")
    assert WorkerConfig(model=Path("/models/v3"), weights_root=Path("/steps")).checkpoints == Path("/steps")
    weights, frontend = await paused(Ranks())
    frontend.config = WorkerConfig(engine="sim")
    with pytest.raises(MillraceError, match="path /x is not below weights_root"):
        await weights.load("/x", "")


async def test_no_other_call_of_operators_has_a_path() -> None:
    requests = [method.input_type for method in worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods]
    named = {f"{it.name}.{field.name}" for it in requests for field in it.fields if field.type == field.TYPE_STRING}
    texts = {"AbortRequest.reason", "SetDutyRequest.router_id", "SetDutyRequest.why"}  # for logs
    assert named == texts | {"SetWeightsRequest.path", "SetWeightsRequest.version"}


@pytest.mark.parametrize(
    "error", [MillraceError(Reason.STALLED, "the ranks took longer than 1 s"), OSError("no process took longer")]
)
async def test_ranks_that_do_not_wake_are_stopped_and_can_be_woken_again(error: Exception) -> None:
    late = [error]

    def starts() -> None:
        if late:
            raise late.pop()

    ranks = Ranks()
    weights, frontend = await paused(ranks, starts)
    await weights.sleep()
    with pytest.raises(type(error), match="took longer"):
        await weights.wake("", "")
    assert frontend.calls == ["the worker goes to sleep", "stop", "start None", "stop"]
    with pytest.raises(MillraceError, match="wake it first"):
        await weights.resume()
    await weights.wake("", "")
    assert ranks.sent == [Pause(True), Pause(True)], "the new engines begin no step either"
    await weights.resume()
    assert frontend.lifecycle.state is State.READY


async def test_wake_that_comes_half_way_leaves_no_weights_without_a_version() -> None:
    """The ranks are up, and an engine does not say in time that it is paused."""
    ranks = Ranks("")
    weights, frontend = await paused(ranks, lambda: frontend.says(False))
    await weights.sleep()
    ranks.says = lambda paused: None
    frontend.config = WorkerConfig(engine="sim", weights_root="/", timeouts=WorkerTimeouts(stall=0.01))
    with pytest.raises(MillraceError, match="the end of steps and copies took longer"):
        await weights.wake("/checkpoints/two", "2b")
    assert frontend.calls[-2:] == ["start /checkpoints/two", "stop"]
    with pytest.raises(MillraceError, match="wake it first"):
        await weights.resume()
    ranks.says = frontend.says
    await weights.wake("/checkpoints/two", "2b")
    assert [(order.path, order.version) for order in ranks.orders] == [("", "2b")]
    await weights.resume()
    assert (frontend.lifecycle.state, frontend.version) == (State.READY, "2b")
