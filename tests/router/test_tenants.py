"""API keys and their limits: the file, its changes, and that nothing of it is ever told."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.config import RouterConfig
from millrace_router.http import api_keys
from millrace_router.http.api_keys import Keys
from millrace_router.main import main as router_main
from millrace_router.queue.tenant import Bucket, Tenant
from millrace_rpc.errors import MillraceError

SECRET = "sk-very-secret-0123456789abcdefgh"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
        (f"keys: [{{name: {SECRET} {SECRET}, key: short}}]", "keys.0: key: give .* at least 32"),
        (f"keys: [{{name: a, key: !!int {SECRET}}}]", "is not YAML"),
        (f"keys: [{{name: a, key: !!timestamp {SECRET}}}]", "is not YAML"),
        ("keys: " + "[" * 5_000, "is not YAML"),
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


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("breaks", [None, *BREAKS])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seen", [False, True])
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


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Keys(tmp_path / "keys.yaml", Clock(), lambda _: None)


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


def test_a_priority_is_capped() -> None:
    assert Tenant().allowed(7) == 7
    assert Tenant(priority=3).allowed(7) == 3 and Tenant(priority=3).allowed(-7) == -7


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


def test_a_router_that_would_take_keys_in_plain_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("model=m", "api_keys=keys", "http=0.0.0.0:8000")
    monkeypatch.setattr(sys, "argv", ["millrace_router", *(f"--set={setting}" for setting in settings)])
    with pytest.raises(SystemExit) as stop:
        router_main()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1 and "api_keys_plaintext=true" in told
