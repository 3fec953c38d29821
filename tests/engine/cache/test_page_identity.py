"""A page serves the prompts of its tokens and its salt, on every tier, and equal blocks break nothing."""

import random
from pathlib import Path

import pytest
from engine.harness import SETTINGS, Driver, fill_pages, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import (
    FlushCache,
    KvArrived,
    KvOffered,
    LeaseEnded,
    RequestId,
    Route,
    SequenceOutput,
    ServePrefix,
)
from millrace_serve.engine.schedule import requests, sequence
from millrace_testing.blocks import block
from millrace_testing.examples import examples

SIZE = 64
LARGE = {"page_size": SIZE, "max_model_len": 5 * SIZE, "max_prefill_tokens": 2 * SIZE, "num_pages": 8}


def page_of(number: int) -> list[int]:
    digits = [token for byte in number.to_bytes(8, "little") for token in (100 + byte, 7)]
    return [7] * 30 + digits + [7] * 18


# Both were 0x712def9ddf9405d8.
A, B = ([*page_of(number), 5, 5] for number in (0x2C0BF9D0415D509E, 0x3F9E1A1D9CD41757))
# What the prompts of two requests have to do with each other: tokens and salts of the first and of the second.
STRANGERS = {"equal hashes once": ((A, b""), (B, b"")), "two tenants": ((A, b"one"), (A, b"two"))}
strangers = pytest.mark.parametrize("pair", STRANGERS.values(), ids=list(STRANGERS))
Prompt = tuple[list[int], bytes]


class Caches(Driver):
    """An engine with whichever tiers a test wants."""

    def __init__(self, **config: object) -> None:
        wide = SETTINGS.model_copy(update={"vocab_size": 400})
        super().__init__(Role.UNIFIED, wide, **{**LARGE, **config})
        self.cached: dict[int, int] = {}

    def ask(self, prompt: Prompt, room: int) -> int:
        """Tokens of the prompt that were found in some tier; the answer is held against the oracle."""
        self.submit(request(room, prompt[0], max_tokens=2, salt=prompt[1]))
        self.settle()
        assert self.finish[RequestId(room, 0)].error is None
        return self.cached[room]

    def settle(self) -> None:
        host = self.engine.host
        while self.engine.has_work() or self.copying() or host.disk.pinned or host.disk.loads:
            self.step()
        host.check()

    def push_out(self, room: int = 900) -> None:
        """Evict everything from the device's prefix cache."""
        for number in range(2):  # each takes most of the pool
            self.ask(([room % 100 + number] * (4 * SIZE), b"nobody"), room + number)

    def _take(self, output: SequenceOutput) -> None:
        self.cached.setdefault(output.id.room, output.found.cached_tokens)
        super()._take(output)


@strangers
def test_on_the_device(pair: tuple[Prompt, Prompt]) -> None:
    driver = Caches()
    first, second = pair
    assert driver.ask(first, 1) == 0
    assert driver.ask(second, 2) == 0
    assert driver.ask(first, 3) == driver.ask(second, 4) == SIZE
    driver.push_out()  # which ended the rank when both had one hash
    driver.check_whole()


@strangers
def test_in_the_host_tier(pair: tuple[Prompt, Prompt]) -> None:
    driver = Caches(host_pages=20)
    first, second = pair
    assert driver.ask(first, 1) == 0
    driver.push_out()
    assert driver.ask(second, 2) == 0
    driver.push_out(910)
    assert driver.ask(first, 3) == driver.ask(second, 4) == SIZE
    assert driver.engine.load().counters["host_cached_tokens"] == 2 * SIZE
    driver.check_whole()
    driver.engine.close()


@strangers
def test_in_the_disk_tier(pair: tuple[Prompt, Prompt], tmp_path: Path) -> None:
    first, second = pair
    for prompt, room, found in ((first, 1, 0), (second, 2, 0), (first, 3, SIZE), (second, 4, SIZE)):
        driver = Caches(host_pages=20, folder=tmp_path)  # a process that is started again
        assert driver.ask(prompt, room) == found
        driver.engine.close()


@strangers
def test_served_pages(pair: tuple[Prompt, Prompt]) -> None:
    driver = Caches(num_pages=20)
    driver.ask(pair[0], 1)
    for prefix_fetch, (tokens, salt) in enumerate(pair, 1):
        driver.tell(ServePrefix(RequestId(0, prefix_fetch), page_hashes(tokens[:SIZE], SIZE, salt=salt)))
    driver.settle()
    assert [len(driver.served[RequestId(0, prefix_fetch)].page_ids) for prefix_fetch in (1, 2)] == [1, 0]
    driver.tell(LeaseEnded(RequestId(0, 1)))
    driver.settle()
    driver.check_whole()


def test_what_a_preempted_or_a_replayed_request_wrote_keeps_its_salt() -> None:
    """The pages behind the prompt are hashed when it leaves."""
    driver = Caches()
    driver.submit(request(1, A, max_tokens=SIZE, salt=b"one"))
    driver.settle()
    longer = A + driver.tokens[RequestId(1, 0)]
    assert driver.ask((longer, b"two"), 2) == 0
    assert driver.ask((longer, b"one"), 3) == len(longer) // SIZE * SIZE > SIZE
    driver.check_whole()


def test_page_of_another_tenant_is_an_error_with_canaries() -> None:
    """Whatever mistake brings it: no step uses it."""
    driver = Driver(Role.PREFILL)
    prompt = list(range(20, 34))
    driver.submit(request(1, prompt, Route.EXPORT, fetches_prefix=True, salt=b"one"))
    driver.run(KvOffered(RequestId(1, 0), 1))
    fill_pages(driver, driver.reserved[RequestId(1, 0)].page_ids, prompt[:4], 0, salt=b"two")
    driver.run(KvArrived(RequestId(1, 0)))
    error = driver.finish[RequestId(1, 0)].error
    assert error is not None and error.reason == Reason.KV_MISMATCH


def weak_hashes(tokens, page_size=64, *, salt=b"", prev=None) -> list[bytes]:
    """Sixteen blocks for everything."""
    strong = page_hashes(tokens, page_size, salt=salt, prev=prev)
    return [block(one[0] % 16) for one in strong]


@examples(22)
@given(st.integers(0, 2**32), st.booleans())
def test_prompts_whose_blocks_collide(seed: int, tiers: bool) -> None:
    """Canaries, which are whole digests, fail a request on a page of other tokens or of another salt. In lower tiers
    the digest is the proof, so that a page may be wrong; but it ends one request, and no engine.
    """
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        for module in (requests, sequence):
            patch.setattr(module, "page_hashes", weak_hashes)
        role = Role.UNIFIED if tiers else rng.choice((Role.UNIFIED, Role.DECODE))
        driver = Driver(role, **({"host_pages": rng.randrange(1, 9)} if tiers else {}))
        for room in range(1, 12):
            prompt = [rng.randrange(10, 12) for _ in range(rng.randrange(1, 20))]
            salt = b"" if tiers else rng.choice((b"", b"x"))
            driver.submit(request(room, prompt, max_tokens=rng.randrange(1, 9), salt=salt))
            if not tiers and rng.random() < 0.3:
                wanted = weak_hashes([rng.randrange(10, 12) for _ in range(12)], 4)
                driver.tell(ServePrefix(RequestId(0, room), wanted))
            if not tiers and rng.random() < 0.1:
                driver.tell(FlushCache())
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run()
        errors = {output.error.reason for output in driver.finish.values() if output.error}
        assert errors <= ({Reason.KV_MISMATCH} if tiers else set())
        driver.end_leases()
        driver.engine.host.check()
        driver.check_whole()
        driver.engine.close()
