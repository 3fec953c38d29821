"""API keys and their limits: the file and its changes, what a tenant may run, and that everything is given back."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_common.split import Slo
from millrace_router.config import RouterConfig
from millrace_router.http import api_keys
from millrace_router.http.api_keys import Keys
from millrace_router.queue.tenant import Bucket, Running, Tenant
from millrace_rpc.errors import MillraceError, from_rpc_error
from router.fake_worker import UNIFIED, Behaviour, FakeWorker, fails, hangs, normal
from router.harness import FIRST_KEY, SECOND_KEY, Clock, Cluster, bearer, request_of, write_keys

SECRET = "sk-very-secret-0123456789abcdefgh"


def keys_of(path: Path, *entries: dict[str, object], clock: Clock | None = None, told: list[str] | None = None) -> Keys:
    path.write_text(json.dumps({"keys": entries}))
    return Keys(path, clock or Clock(), (told if told is not None else []).append)


def test_a_key_or_its_hash(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another secret").hexdigest()
    keys = keys_of(tmp_path / "keys", {"name": "a", "key": SECRET}, {"name": "b", "sha256": digest, "weight": 2})
    assert keys.tenant(f"Bearer {SECRET}").name == "a"
    assert keys.tenant("bearer another secret").weight == 2
    assert SECRET not in repr(vars(keys))


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", "Bearer é\x00"]
)
def test_anything_else_is_refused(tmp_path: Path, header: str) -> None:
    keys = keys_of(tmp_path / "keys", {"name": "a", "key": SECRET})
    with pytest.raises(MillraceError) as caught:
        keys.tenant(header)
    assert caught.value.reason is Reason.UNAUTHENTICATED and SECRET not in caught.value.message


def test_changes_are_picked_up_and_rates_live_on(tmp_path: Path) -> None:
    clock, told, path = Clock(), [], tmp_path / "keys"
    entry = {"name": "a", "key": SECRET, "requests_per_s": 1, "requests_burst": 3}
    keys = keys_of(path, entry, clock=clock, told=told)
    for _ in range(3):
        keys.tenant(f"Bearer {SECRET}").begin(10, clock.now)
    path.write_text(json.dumps({"keys": [entry | {"weight": 5}, {"name": "b", "key": SECRET + "2"}]}))
    clock.now = 1.0
    assert keys.tenant(f"Bearer {SECRET}2").name == "b" and told == ["ok"]
    tenant = keys.tenant(f"Bearer {SECRET}")
    assert tenant.weight == 5
    tenant.check(1.0)  # what came back in the second that has passed
    tenant.begin(10, 1.0)
    with pytest.raises(MillraceError):
        tenant.check(1.0)  # a new file is no new allowance
    path.write_text(json.dumps({"keys": [entry | {"key": "sk-replaced-0123456789abcdefghijk"}]}))
    clock.now = 2.0
    with pytest.raises(MillraceError):
        keys.tenant(f"Bearer {SECRET}")


def test_a_new_file_is_no_new_debt_and_forgives_none(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "keys"
    entry = {"name": "a", "key": SECRET, "tokens_per_s": 10, "tokens_burst": 100}
    keys = keys_of(path, entry, clock=clock)
    before = keys.tenant(f"Bearer {SECRET}")
    before.begin(100, clock.now)
    clock.now = 60.0  # all of it has come back
    path.write_text(json.dumps({"keys": [entry | {"tokens_burst": 50}]}))
    tenant = keys.tenant(f"Bearer {SECRET}")
    tenant.check(clock.now)
    before.spend(90, clock.now)  # an answer that began before the change
    with pytest.raises(MillraceError) as caught:
        tenant.check(clock.now)
    assert caught.value.retry_after_s == pytest.approx(4.1)


def test_a_tenant_may_have_two_keys(tmp_path: Path) -> None:
    """For as long as its clients move from one to the other."""
    entry = {"name": "a", "requests_per_s": 1, "requests_burst": 2}
    keys = keys_of(tmp_path / "keys", entry | {"key": SECRET}, entry | {"key": SECRET + "2"})
    old, new = keys.tenant(f"Bearer {SECRET}"), keys.tenant(f"Bearer {SECRET}2")
    for tenant in (old, new):
        tenant.check(0.0)
        tenant.begin(1, 0.0)
    for tenant in (old, new):
        with pytest.raises(MillraceError, match="a is limited to 1 requests per second"):
            tenant.check(0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"keys: [{{name: a, key: {SECRET}, colour: red}}]", "keys.0.colour"),
        (f"keys: [{{name: a b, key: {SECRET}}}]", "keys.0.name"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: b, key: {SECRET}}}]", "two have the same sha256"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: a, key: {SECRET}2, weight: 2}}]", "two of the same name differ"),
        (f"keys: [{{name: a, key: {SECRET}, sha256: {'0' * 64}}}]", "give either sha256 or key"),
        (f"keys: [{{name: a, key: [{SECRET}]}}]", "give either sha256 or key"),
        (f"keys: [{{name: b, key: {SECRET}}}, {{name: a, key: {SECRET[:31]}}}]", "keys.1: key of a: .* at least 32"),
        (f"keys: [{{name: {SECRET} {SECRET}, key: short}}]", r"keys.0: key: give .* at least 32 .*makes one\)$"),
        (f"keys: [{{name: a, key: !!int {SECRET}}}]", "is not YAML"),
        (f"keys: [{{name: a, key: !!timestamp {SECRET}}}]", "is not YAML"),
        ("keys: " + "[" * 1_000, "is not YAML"),
        (f"keys: [{{name: a, sha256: {SECRET}}}]", "keys.0.sha256"),
        (f"keys: [{SECRET}]", "keys.0"),
        (f"keys: {{{SECRET}", "is not YAML"),
        ("keys: []", "keys"),
        (SECRET, "the file"),
    ],
)
def test_mistakes_are_named_and_secrets_are_not(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(OSError, match=words) as caught:
        Keys(path, Clock(), lambda _: None)
    assert SECRET not in str(caught.value) and caught.value.__cause__.__cause__ is None


ONE, TWO = {"name": "one", "key": SECRET}, {"name": "two", "key": SECRET + "2"}
WITH, WITHOUT = json.dumps({"keys": [ONE, TWO]}), json.dumps({"keys": [TWO]})


def rewrite(path: Path, text: str) -> None:
    """In place, with the same size and times."""
    stat = path.stat()
    path.write_text(text.ljust(stat.st_size))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap(path: Path, text: str) -> None:
    """As the kubelet does: keys -> ..data/keys, ..data -> the folder of a version."""
    version = path.parent / f"..{len(list(path.parent.iterdir()))}"
    version.mkdir()
    (version / path.name).write_text(text)
    (path.parent / "..new").symlink_to(version.name)
    (path.parent / "..new").replace(path.parent / "..data")
    if not path.is_symlink():
        path.unlink()
        path.symlink_to(f"..data/{path.name}")


def replace(path: Path, text: str) -> None:
    (path.parent / "new").write_text(text)
    (path.parent / "new").replace(path)


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


WRITES = (Path.write_text, rewrite, replace, swap)
BREAKS: dict[str, Callable[[Path], object]] = {
    "vanishes": Path.unlink,
    "unreadable": turn_into_a_folder,
    "link to nowhere": link_to_nowhere,
    "empty": lambda path: path.write_text(""),
    "half written": lambda path: path.write_text(WITHOUT[:-5]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "no keys": lambda path: path.write_text("keys: []"),
    "short key": lambda path: path.write_text('keys: [{name: one, key: "short"}]'),
}


def outcome(keys: Keys, key: str) -> str:
    try:
        return keys.tenant(f"Bearer {key}").name
    except MillraceError as error:
        return error.reason


@pytest.mark.parametrize(
    ("write", "breaks", "keep", "seen"),
    [
        *((write, None, False, seen) for write in WRITES for seen in (False, True)),
        *((replace, breaks, keep, seen) for breaks in BREAKS for keep in (False, True) for seen in (False, True)),
    ],
)
def test_a_deleted_key_works_for_a_second_at_most(
    tmp_path: Path,
    write: Callable[[Path, str], None],
    breaks: str | None,
    keep: bool,
    seen: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`seen`: somebody asks between the deletion and what breaks the file."""
    clock, told, path = Clock(), [], tmp_path / "keys"
    path.write_text(WITH)
    keys = Keys(path, clock, told.append, keep=keep)
    clock.now = 0.999
    assert outcome(keys, SECRET) == "one"
    write(path, WITHOUT)
    clock.now = 1.5
    if seen:
        assert outcome(keys, SECRET) == Reason.UNAUTHENTICATED and outcome(keys, SECRET + "2") == "two"
    if breaks is not None:
        BREAKS[breaks](path)
    clock.now = 2.5
    after = [outcome(keys, SECRET), outcome(keys, SECRET + "2")]
    if breaks is None:
        assert after == [Reason.UNAUTHENTICATED, "two"] and told == ["ok"]
        return
    assert told[-1] == "failed"
    if not keep:
        assert after == [Reason.NOT_READY] * 2
        assert keys.names == ({"two"} if seen else {"one", "two"}), "metrics do not need the file"
    else:
        assert after == [Reason.UNAUTHENTICATED if seen else "one", "two"]
    clock.now = 3.5
    assert [outcome(keys, SECRET), outcome(keys, SECRET + "2")] == after
    assert told.count("failed") == 2, "an alert stays for as long as the file is bad"
    assert [record.levelname for record in caplog.records].count("WARNING") == 1, "the log says it once"
    if path.is_dir():
        path.rmdir()
    replace(path, WITHOUT)
    clock.now = 4.5
    assert [outcome(keys, SECRET), outcome(keys, SECRET + "2")] == [Reason.UNAUTHENTICATED, "two"]
    assert told[-1] == "ok"


def test_a_load_that_fails_is_repeated_though_the_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told, path = Clock(), [], tmp_path / "keys"
    keys = keys_of(path, ONE, TWO, clock=clock, told=told)
    path.write_text(WITHOUT)
    clock.now = 1.0
    with monkeypatch.context() as patched:
        patched.setattr(api_keys, "read", lambda path: (_ for _ in ()).throw(OSError("too many open files")))
        assert outcome(keys, SECRET) == Reason.NOT_READY
    clock.now = 2.0
    assert outcome(keys, SECRET) == Reason.UNAUTHENTICATED and outcome(keys, SECRET + "2") == "two"
    assert told == ["failed", "ok"]


def test_rates_say_when() -> None:
    tenant = Tenant("a", requests=Bucket(2, 4, 0.0), tokens=Bucket(100, 200, 0.0))
    for _ in range(4):
        tenant.check(0.0)
        tenant.begin(10, 0.0)
    with pytest.raises(MillraceError, match="2 requests per second") as caught:
        tenant.check(0.0)
    assert caught.value.reason is Reason.RATE_LIMITED and caught.value.retry_after_s == pytest.approx(0.5)
    tenant.spend(460, 0.0)  # an answer: 300 tokens of debt
    with pytest.raises(MillraceError, match="100 tokens per second") as caught:
        tenant.check(1.0)
    assert caught.value.retry_after_s == pytest.approx(2.01)
    tenant.check(1.0 + caught.value.retry_after_s)


@pytest.mark.parametrize(
    ("own", "expected"),
    [({}, (2.0, 0.05)), ({"ttft": 0.5}, (0.5, 0.05)), ({"ttft": 3, "tpot": 0.02}, (3.0, 0.02))],
)
def test_limits_of_a_tenant_take_the_place_of_the_routers(
    tmp_path: Path, own: dict[str, float], expected: tuple[float, float]
) -> None:
    keys = keys_of(tmp_path / "keys", {"name": "a", "key": FIRST_KEY, "slo": own})
    assert keys.tenant(f"Bearer {FIRST_KEY}").limits(Slo(2.0, 0.05)) == Slo(*expected)
    assert not Tenant().limits(Slo()).limited


@given(
    st.floats(0.1, 1000), st.floats(1, 1000), st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 100)), max_size=50)
)
def test_a_bucket_never_gives_more_than_its_rate(rate: float, burst: float, asks: list[tuple[float, float]]) -> None:
    bucket, now, given_out = Bucket(rate, burst, 0.0), 0.0, 0.0
    for pause, amount in asks:
        now += pause
        amount = min(amount, burst)
        wait = bucket.wait_for(amount, now)
        if wait == 0:
            bucket.take(amount, now)
            given_out += amount
        else:
            assert bucket.wait_for(amount, now + wait + 1e-6) == 0
            now += wait
        assert given_out <= burst + rate * now + 1e-6


# ------------------------------------------------------------------------------------- keys and TLS

TLS = {"cert": "cert.pem", "key": "key.pem"}
OUTSIDE = ("0.0.0.0:8000", "[::]:8000", "10.1.2.3:8000", "router.example:8000", "[2001:db8::1]:8000")
INSIDE = ("127.0.0.1:8000", "127.9.9.9:8000", "[::1]:8000", "localhost:8000")


@pytest.mark.parametrize("port", ["grpc", "http"])
@pytest.mark.parametrize("address", [*OUTSIDE, *INSIDE])
@pytest.mark.parametrize(
    ("settings", "encrypted"),
    [({}, False), ({"tls": TLS}, True), ({"public_tls": TLS}, True), ({"api_keys_plaintext": True}, True)],
)
def test_keys_do_not_cross_a_network_in_plain(
    port: str, address: str, settings: dict[str, object], encrypted: bool
) -> None:
    values = {"model": "m", port: address, **settings}
    assert RouterConfig.model_validate(values).api_keys is None, "without keys there is nothing to protect"
    if encrypted or address in INSIDE:
        assert RouterConfig.model_validate(values | {"api_keys": "keys"}).api_keys == Path("keys")
    else:
        with pytest.raises(ValueError, match=rf"api_keys: {port}={re.escape(address)} .* needs tls or public_tls"):
            RouterConfig.model_validate(values | {"api_keys": "keys"})


# ------------------------------------------------------------------------------------- what a tenant runs at once


PROMPT = [10, 20, 30]


def body(n: int = 1, max_tokens: int = 4, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "n": n, "seed": 0, **fields}


@pytest.fixture
async def limited(cluster: Callable, tmp_path: Path) -> Cluster:
    limits = {"max_concurrent": 4, "max_tokens_in_flight": 100}
    settings = {"api_keys": write_keys(tmp_path, limits), "timeouts": {"queue": 0.5}, "max_attempts": 2}
    return await cluster(FakeWorker(UNIFIED), **settings)


def running(made: Cluster) -> Running:
    return made.router._keys.tenant(f"Bearer {FIRST_KEY}").running


async def start(made: Cluster, n: int, max_tokens: int) -> asyncio.Task[httpx.Response]:
    """A request that runs until it is cancelled."""
    before = running(made).requests
    made.workers[0].script.extend([hangs(1)] * n)
    wanted = made.http.post("/v1/completions", json=body(n, max_tokens), headers=bearer())
    task = asyncio.create_task(wanted)
    await made.until(lambda: running(made).requests == before + n)
    return task


async def grpc_error(made: Cluster, n: int, max_tokens: int) -> tuple[grpc.StatusCode, MillraceError]:
    request = request_of(PROMPT, max_tokens, n)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in made.stub.Generate(request, metadata=tuple(bearer().items())):
            pass
    return caught.value.code(), from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("held", "asked", "limit"),
    [
        ((3, 4), (2, 4), "max_concurrent of one is 4: 3 requests run, and this needs 2"),
        ((1, 90), (1, 5), "max_tokens_in_flight of one is 100: 93 tokens run, and this needs 8"),
        ((2, 30), (2, 15), "max_tokens_in_flight of one is 100: 66 tokens run, and this needs 36"),
    ],
)
async def test_more_than_a_limit_is_refused_until_something_ends(
    limited: Cluster, held: tuple[int, int], asked: tuple[int, int], limit: str
) -> None:
    task = await start(limited, *held)
    answer = await limited.http.post("/v1/completions", json=body(*asked), headers=bearer())
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == limit and answer.json()["error"]["code"] == "rate_limited"
    code, error = await grpc_error(limited, *asked)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s == 1 and error.message == limit
    assert limited.metric("millrace_tenant_requests_total", tenant="one", status="rate_limited") == 2
    other = await limited.http.post("/v1/completions", json=body(*asked), headers=bearer(SECOND_KEY))
    assert other.status_code == 200, "another tenant has its own limits"
    task.cancel()
    await limited.until(lambda: (running(limited).requests, running(limited).tokens) == (0, 0))
    assert (await limited.http.post("/v1/completions", json=body(*asked), headers=bearer())).status_code == 200


@pytest.mark.parametrize(
    ("asked", "field", "limit"),
    [
        ((5, 4), "n", "n asks for too much: max_concurrent of one is 4, and this needs 5 requests at once"),
        ((1, 98), "max_tokens", "max_tokens asks for too much: max_tokens_in_flight of one is 100, and this needs 101"),
    ],
)
async def test_what_never_fits_is_a_mistake(limited: Cluster, asked: tuple[int, int], field: str, limit: str) -> None:
    answer = await limited.http.post("/v1/completions", json=body(*asked), headers=bearer())
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(limit) and error["param"] == field
    code, refusal = await grpc_error(limited, *asked)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and refusal.message.startswith(limit)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 200}
    answer = await limited.http.post("/v1/chat/completions", json=chat, headers=bearer())
    assert answer.json()["error"]["param"] == "max_completion_tokens", "by the name that the client wrote"
    assert not limited.workers[0].submitted


def test_a_new_file_changes_the_limits_and_not_what_runs(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "keys"
    keys = keys_of(path, {"name": "a", "key": FIRST_KEY}, clock=clock)
    before = keys.tenant(f"Bearer {FIRST_KEY}")
    before.running.add(2, 20)
    path.write_text(json.dumps({"keys": [{"name": "a", "key": FIRST_KEY, "max_concurrent": 2}]}))
    clock.now = 1.0
    after = keys.tenant(f"Bearer {FIRST_KEY}")
    with pytest.raises(MillraceError) as caught:
        after.check(1.0)
    assert caught.value.reason is Reason.RATE_LIMITED
    before.running.add(-1, -10)
    after.check(1.0)


# ------------------------------------------------------------------------------------- given back, whatever happens

WORKER = {
    "answers": normal,
    "fails": fails("INTERNAL"),
    "fails later": fails("INTERNAL", 2),
    "is lost": fails("WORKER_LOST", 1),
    "is busy": fails("OVERLOADED"),
    "hangs": hangs(),
    "hangs later": hangs(2),
}


class Scripts:
    """The seed of a request says what the worker does with it."""

    def popleft(self) -> Behaviour:
        def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
            kind = list(WORKER)[request.sampling.seed // 100]
            busy_again = kind == "is busy" and request.id.attempt > 0
            return (normal if busy_again else WORKER[kind])(worker, request)

        return behave


CLIENT = ("reads", "leaves at once", "leaves later", "has a deadline")
API = ("grpc", "stream", "whole")


async def by_grpc(made: Cluster, n: int, max_tokens: int, seed: int, client: str) -> None:
    request = request_of(PROMPT, max_tokens, n, seed=seed)
    timeout = 0.05 if client == "has a deadline" else None
    call = made.stub.Generate(request, metadata=tuple(bearer().items()), timeout=timeout)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if client != "leaves at once":
            async for _ in call:
                if client == "leaves later":
                    break
    call.cancel()


async def by_http(made: Cluster, n: int, max_tokens: int, seed: int, client: str, stream: bool) -> None:
    """With a socket, which a client that leaves closes in the middle."""
    text = json.dumps(body(n, max_tokens, stream=stream, seed=seed))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {FIRST_KEY}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.ports["http"])
    writer.write(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())
    with contextlib.suppress(TimeoutError):
        if client == "reads":
            await reader.read()
        elif client == "leaves later":
            await asyncio.wait_for(reader.read(16), 0.05)
        elif client == "has a deadline":
            await asyncio.wait_for(reader.read(), 0.05)
    writer.transport.abort()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_ends_a_request_gives_back_what_it_held(
    limited: Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw, seen, ends = random.Random(seed), set(), set()
    real = Running.add

    def add(self: Running, requests: int, tokens: int) -> None:
        real(self, requests, tokens)
        if self.max_concurrent is not None:
            seen.add((self.requests, self.tokens))

    monkeypatch.setattr(Running, "add", add)
    limited.workers[0].script = Scripts()
    at_once = asyncio.Semaphore(6)

    async def one() -> None:
        n, max_tokens = draw.choice((1, 1, 1, 2, 3, 5)), draw.choice((1, 4, 20, 70, 98))
        client, api, does = draw.choice(CLIENT), draw.choice(API), draw.choice(list(WORKER))
        if client in ("reads", "leaves later") and does.startswith("hangs"):
            client = "leaves at once" if does == "hangs" else "leaves later"
        ends.add((client, api, does))
        asked = limited, n, max_tokens, 100 * list(WORKER).index(does), client
        async with at_once:
            await (by_grpc(*asked) if api == "grpc" else by_http(*asked, api == "stream"))

    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(one())
    await limited.until(lambda: not limited.router.inference.active)
    assert (running(limited).requests, running(limited).tokens) == (0, 0)
    requests, tokens = ({*column} for column in zip(*seen, strict=True))
    assert min(requests) == min(tokens) == 0 and max(requests) == 4 and 50 < max(tokens) <= 100
    assert len(ends) > 50, "in many ways"
