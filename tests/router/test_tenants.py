"""API keys and their limits: the file, its changes, and that nothing of it is ever told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.reasons import Reason
from millrace_router.edge.api_keys import Keys
from millrace_router.flow.tenant import Bucket, Tenant
from millrace_rpc.errors import MillraceError

SECRET = "sk-very-secret-0123456789"


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
    path.write_text("{")
    clock.now = 2.0
    assert keys.tenant(f"Bearer {SECRET}").weight == 5 and told == ["ok", "failed"]
    path.write_text(json.dumps({"keys": [entry | {"key": "sk-replaced-0000"}]}))
    clock.now = 3.0
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
