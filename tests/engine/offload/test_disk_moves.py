"""The disk tier below the host tier: a store of pages that outlives engines, over the simulated engine."""

import itertools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from engine.harness import SETTINGS, Driver, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_serve.engine.cache.changes import BlockChanges
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import FlushCache, Load, Pause, Route, SequenceOutput
from millrace_serve.engine.offload import disk_moves, disk_tier
from millrace_serve.engine.offload.disk_moves import LOAD_S, DiskMoves
from millrace_serve.engine.offload.disk_tier import Move
from millrace_serve.engine.offload.host_tier import Copy, HostTier
from millrace_serve.engine.offload.page_folder import PageFolder
from millrace_testing import HANG_S
from millrace_testing.blocks import block, blocks
from millrace_testing.examples import examples
from millrace_testing.oracle import oracle_outputs


class Store:
    """A DiskTier whose moves end when the test says so."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.moves: list[Move] = []
        self.ended: list[Move] = []
        self.behind = False

    def count(self, blocks: list[bytes]) -> int:
        return sum(1 for _ in itertools.takewhile(self.blocks.__contains__, blocks))

    def load(self, block: bytes, slot: int) -> None:
        self.moves.append(Move(block, slot, True))

    def store(self, block: bytes, slot: int) -> bool:
        if not self.behind:
            self.moves.append(Move(block, slot, False))
        return not self.behind

    def end(self, index: int, ok: bool = True) -> None:
        move = self.moves.pop(index)
        if ok and not move.is_load:
            self.blocks.add(move.block)
        self.ended.append(Move(move.block, move.slot, move.is_load, ok, refused=move.is_load and not ok))

    def take(self) -> list[Move]:
        ended, self.ended = self.ended, []
        return ended

    def remove(self, blocks: Iterable[bytes]) -> None:
        self.blocks.difference_update(blocks)

    def close(self) -> bool:
        return True


def made(slots: int, clock: Callable[[], float] = lambda: 0.0) -> tuple[HostTier, DiskMoves, Store]:
    tier, store = HostTier(slots, BlockChanges()), Store()
    moves = DiskMoves(tier, clock)
    moves.store = store
    return tier, moves, store


def whole(tier: HostTier, *numbers: int) -> list[Copy]:
    copies = [tier.begin(its) for its in blocks(*numbers)]
    for copy in copies:
        tier.end(copy, good=True)
    return copies


def counted(**pages: int) -> dict[str, int]:
    """What DiskMoves counts, of which the others are 0."""
    return {f"disk_pages/{what}": pages.get(what, 0) for what in ("store", "load", "refuse", "failed")}


@pytest.mark.parametrize("ok", [True, False])
def test_copy_keeps_its_slot_while_it_is_stored(ok: bool) -> None:
    tier, moves, store = made(1)
    moves.keep(whole(tier, 7))
    assert tier.begin(block(8)) is None, "the only slot is being read"
    store.end(0, ok)
    moves.poll()
    assert tier.begin(block(8)) is not None and (block(7) in store.blocks) is ok
    assert moves.counters() == (counted(store=1) if ok else counted(failed=1))


def test_store_that_is_behind_refuses_pages_without_losing_a_slot() -> None:
    tier, moves, store = made(2)
    store.behind = True
    moves.keep(whole(tier, 8, 7))
    for number in range(9, 99):  # 8 is used again and again, all others are evicted
        tier.touch([block(8)])
        moves.keep(whole(tier, number))
    assert not moves.pinned and len(moves._new) <= 4
    store.behind = False
    moves.poll()
    assert [copy.block for copy in moves.pinned] == blocks(8, 98)


def test_load_that_fails_in_the_middle_gives_what_came_before_it() -> None:
    tier, moves, store = made(4)
    store.blocks = set(blocks(1, 2, 3, 5))
    assert moves.count(blocks(1, 2, 3, 4, 5)) == 3
    came: list[list[Copy]] = []
    moves.load(blocks(1, 2, 3), came.append)
    store.end(2)
    store.end(1, ok=False)
    moves.poll()
    assert moves.loads and not came
    tier.check(moves.pinned)
    store.end(0)
    moves.poll()
    [good] = came
    assert [copy.block for copy in good] == blocks(1) and not moves.loads
    assert moves.counters() == counted(load=2, refuse=1, failed=1)
    tier.check(good)
    tier.unpin(good[0])
    assert [copy.block for copy in tier.find(blocks(1, 2))] == blocks(1) and tier.get(block(3))
    tier.check([])


def test_store_that_hangs_holds_up_nobody_for_long() -> None:
    now = [0.0]
    tier, moves, store = made(4, lambda: now[0])
    store.blocks = set(blocks(1, 2, 3, 5))
    came: list[list[Copy]] = []
    moves.load(blocks(1, 2, 3), came.append)
    now[0] = LOAD_S - 0.1
    store.end(0)
    moves.poll()
    now[0] += LOAD_S
    moves.poll()
    assert [[copy.block for copy in good] for good in came] == [blocks(1)] and not moves.loads
    assert not moves.count(blocks(5)), "nobody waits for it any more"
    tier.check([*moves.pinned, *came[0]])
    store.end(0)
    moves.poll()
    assert moves.count(blocks(5)) == 1 and [copy.block for copy in tier.find(blocks(1, 2))] == blocks(1, 2)
    tier.check([*moves.pinned, *came[0]])


def test_load_behind_others_shares_their_moves_and_does_not_hang() -> None:
    """A prompt of 1,000 pages takes longer than LOAD_S."""
    now = [0.0]
    tier, moves, store = made(4, lambda: now[0])
    store.blocks = set(blocks(1, 2, 3, 4))
    came: list[list[Copy]] = []
    for wanted in (blocks(1, 2, 3), blocks(4), blocks(2, 3, 4)):
        assert moves.count(wanted) == len(wanted)
        moves.load(wanted, came.append)
    assert [move.block for move in store.moves] == blocks(1, 2, 3, 4)
    for over in (0, 0, 1, 3):
        now[0] += LOAD_S - 0.1
        store.end(0)
        moves.poll()
        assert len(came) == over and moves.loads is (over < 3)
        tier.check([*moves.pinned, *itertools.chain(*came)])
    assert [[copy.block for copy in good] for good in came] == [blocks(1, 2, 3), blocks(4), blocks(2, 3, 4)]


def test_stores_that_hang_seem_to_be_over() -> None:
    now = [10.0]
    tier, moves, store = made(4, lambda: now[0])
    moves.keep(whole(tier, 1, 2))
    for _ in range(2):
        now[0] += LOAD_S - 0.1
        assert moves.stores
        store.end(0)
        moves.poll()
    moves.keep(whole(tier, 3))
    now[0] += LOAD_S
    moves.poll()
    assert not moves.stores and [copy.block for copy in moves.pinned] == blocks(3)


@examples(40)
@given(st.data())
def test_no_slot_is_lost(data: st.DataObject) -> None:
    now = [0.0]
    tier, moves, store = made(data.draw(st.integers(1, 6), "slots"), lambda: now[0])
    store.blocks = set(blocks(*data.draw(st.sets(st.integers(0, 9)), "stored before")))
    readers: list[list[Copy]] = []
    for _ in range(data.draw(st.integers(1, 40), "operations")):
        match data.draw(st.sampled_from(["copy", "load", "end", "fail", "clear", "read", "hang"])):
            case "copy":
                its = block(data.draw(st.integers(0, 9)))
                if tier.get(its) is None and (copy := tier.begin(its)):
                    tier.end(copy, good=True)
                    moves.keep([copy])
            case "load":
                start = data.draw(st.integers(0, 9))
                wanted = blocks(*range(start, 10))
                moves.load(wanted[: moves.count(wanted)], readers.append)
            case "end" | "fail" as how if store.moves:
                store.end(data.draw(st.integers(0, len(store.moves) - 1)), ok=how == "end")
                moves.poll()
            case "clear":
                tier.clear()
            case "hang":
                now[0] += LOAD_S
                moves.poll()
            case "read" if readers:
                tier.unpin(*readers.pop())
        tier.check([*moves.pinned, *(copy for read in readers for copy in read)])
    while store.moves:
        store.end(0)
    moves.poll()
    tier.unpin(*itertools.chain(*readers))
    assert not moves.pinned and not moves.loads
    tier.check([])


PROMPT = list(range(20, 42))  # 22 tokens: 5 full pages of 4, and 2 tokens


class OnDisk(Driver):
    """A simulated engine with room for `host_pages` copies, and a folder below them."""

    def __init__(self, folder: Path, host_pages: int, **config: int) -> None:
        super().__init__(Role.UNIFIED, host_pages=host_pages, folder=folder, **config)

    def ask(self, room: int, tokens: list[int]) -> int:
        """The prompt tokens that were found in some tier."""
        asked = request(room, tokens, Route.LOCAL, max_tokens=2)
        self.submit(asked)
        outputs: list[SequenceOutput] = []
        while not outputs or outputs[-1].finish is None:
            outputs += self.engine.step().outputs
        answer = [token.token_id for output in outputs for token in output.tokens]
        assert answer == oracle_outputs(tokens, asked.sampling, SETTINGS)
        return outputs[0].found.cached_tokens

    def settle(self) -> Load:
        """Until nothing moves between the tiers."""
        host = self.engine.host
        while self.engine.has_work() or self.engine.host.copier.busy or host.disk.pinned:
            self.engine.step()
        host.check()
        return self.engine.load()


def fill_folder(folder: Path) -> None:
    """By an engine that ends."""
    first = OnDisk(folder, host_pages=100)
    assert first.ask(1, PROMPT) == 0
    assert first.settle().counters["disk_pages/store"] == 5
    first.engine.close()


def test_long_prompt_that_the_folder_has_waits_for_no_other(tmp_path: Path) -> None:
    fill_folder(tmp_path)
    second = OnDisk(tmp_path, host_pages=100, max_prefill_tokens=4)
    for room, prompt in enumerate([PROMPT[::-1], PROMPT, PROMPT[1:]], start=1):
        second.submit(request(room, prompt, Route.LOCAL))
        second.engine.step()
        assert len(second.scheduler.requests.waiting) == room // 3
    second.engine.close()


@pytest.mark.parametrize(
    ("host_pages", "torn", "found"),
    [(100, False, 20), (3, False, 12), (100, True, 12)],
    ids=["whole", "up to the size of the host tier", "up to a torn page"],
)
def test_prefix_survives_a_restart(host_pages: int, torn: bool, found: int, tmp_path: Path) -> None:
    fill_folder(tmp_path)
    if torn:
        [page] = tmp_path.rglob(page_hashes(PROMPT, 4)[3].hex())
        page.write_bytes(page.read_bytes()[:-1])
    second = OnDisk(tmp_path, host_pages)
    assert second.ask(1, PROMPT) == found
    counters = second.settle().counters
    assert found < 20 or (counters["disk_pages/load"], counters["host_cached_tokens"]) == (5, 20)
    second.engine.close()


def test_folder_that_does_not_answer_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_folder(tmp_path)
    second, answers, has = OnDisk(tmp_path, host_pages=100), threading.Event(), PageFolder.has

    def hangs(folder: PageFolder, block: bytes) -> bool:
        assert answers.wait(HANG_S), "the step waits"
        return has(folder, block)

    monkeypatch.setattr(PageFolder, "has", hangs)
    monkeypatch.setattr(disk_tier, "LOOK_S", 0.0)
    assert second.ask(1, PROMPT) == second.ask(2, [9, *PROMPT]) == 0
    second.engine.host.disk.remove([block(1)])
    monkeypatch.setattr(disk_tier, "LOOK_S", 60.0)
    answers.set()
    second.engine.host.disk.store._asked.join(HANG_S)
    assert second.engine.host.disk.store.count(page_hashes(PROMPT, 4)) == 5
    second.settle()
    second.engine.close()


def test_folder_that_hangs_keeps_weights_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in a store, then where the folder of the new weights is opened; at last it answers."""
    first, answers, now = OnDisk(tmp_path, host_pages=100), threading.Event(), [0.0]
    engine, host, real = first.engine, first.engine.host, {}
    host.disk._clock = lambda: now[0]
    for name in ("store", "__init__"):

        def hangs(folder: PageFolder, *args: object, name: str = name) -> None:
            assert answers.wait(HANG_S), "the engine waits"
            real[name](folder, *args)

        real[name] = getattr(PageFolder, name)
        monkeypatch.setattr(PageFolder, name, hangs)
    monkeypatch.setattr(disk_tier, "CLOSE_S", 0.0)
    monkeypatch.setattr(disk_moves, "OPEN_S", 0.0)
    assert first.ask(1, PROMPT) == 0
    while not host.disk.stores or engine.host.copier.busy:
        engine.step()
    engine.submit(Pause(on=True))
    engine.step()
    assert not engine.load().paused
    now[0] += LOAD_S
    assert engine.load().paused
    engine.submit(FlushCache())
    for version in ("1" * 32, "2" * 32):
        engine.pool.layout = msgspec.structs.replace(engine.pool.layout, model_hash=version)
        engine.open_store(patient=False)
    engine.submit(Pause(on=False))
    assert first.ask(2, PROMPT) == 0
    assert not host.disk.close(), "a move may still read the host's memory"
    engine.open_store(patient=False)
    answers.set()
    host.disk.store.opened.result(HANG_S)
    assert first.ask(3, [9, *PROMPT]) == 0
    assert first.settle().counters["disk_pages/store"] >= 5
    engine.close()


def test_page_of_other_tokens_is_an_error_once_and_gone(tmp_path: Path) -> None:
    """As after a fault of the disk's own memory: the checksum is right and the content is wrong."""
    fill_folder(tmp_path)
    second = OnDisk(tmp_path, host_pages=100)
    hashes = page_hashes(PROMPT, 4)
    folder = second.engine.host.disk.store._folder
    assert folder.load(hashes[3], 0)
    folder.store(hashes[4], 0)
    second.submit(request(1, PROMPT, Route.LOCAL, max_tokens=2))
    outputs: list[SequenceOutput] = []
    while not outputs:
        outputs = second.engine.step().outputs
    assert outputs[0].error is not None and outputs[0].error.reason == Reason.KV_MISMATCH
    second.settle()
    assert not second.engine.host.disk.store.count(hashes[4:])
    assert second.ask(2, PROMPT) == 0
    second.settle()
    second.engine.close()
