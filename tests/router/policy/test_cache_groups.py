"""Who shares cached pages with whom: the salts that a router gives its requests."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import admin_pb2, inference_pb2
from millrace_common.deployment_secret import LEAST_BYTES, cache_key_id, cache_salt, read
from millrace_common.page_hash import MAX_SALT_BYTES
from millrace_router.http.api_keys import Keys
from millrace_testing.examples import examples
from router.fake_worker import DECODE, PREFILL, FakeWorker, dies, expected
from router.harness import Cluster

TENANTS = {
    "alone": {"name": "alone"},
    "same": {"name": "alone"},  # another key of the same tenant
    "other": {"name": "other"},
    "team-1": {"name": "team-1", "cache_group": "alone"},  # a group is no tenant, whatever its name
    "team-2": {"name": "team-2", "cache_group": "alone"},
    "lab": {"name": "lab", "cache_group": "lab"},
}
SHARING = {frozenset({"alone", "same"}), frozenset({"team-1", "team-2"}), frozenset({"other"}), frozenset({"lab"})}
PROMPT = list(range(1, 140))  # two full pages


def secret(name: str) -> str:
    return f"sk-secret-of-{name}-0123456789abcdefghij"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": [{**rest, "key": secret(name)} for name, rest in TENANTS.items()]}))
    return path


@pytest.fixture
async def made(cluster: Callable, keys: Path) -> Cluster:
    workers = FakeWorker(PREFILL), FakeWorker(DECODE)
    return await cluster(*workers, api_keys=str(keys), prefill_policy="prefix_aware")


def sharing(salts: dict[str, bytes]) -> set[frozenset[str]]:
    return {frozenset(name for name in salts if salts[name] == salt) for salt in salts.values()}


def test_tenants_share_in_a_group_only(keys: Path) -> None:
    tenants = Keys(keys, lambda: 0.0, lambda _: None)
    for ours in (b"", b"of this deployment"):
        salts = {name: cache_salt(ours, tenants.tenant(f"Bearer {secret(name)}").cache_group) for name in TENANTS}
        assert sharing(salts) == SHARING
        assert cache_salt(ours, "") not in salts.values(), "nobody shares with callers without a key"


@examples(25)
@given(st.lists(st.tuples(st.binary(max_size=200), st.text(max_size=20)), max_size=20))
def test_salts_are_of_the_secret_and_the_group(cases: list[tuple[bytes, str]]) -> None:
    seen: dict[bytes, tuple[bytes, str]] = {}
    for ours, group in cases:
        salt = cache_salt(ours, group)
        assert seen.setdefault(salt, (ours, group)) == (ours, group)
        assert len(salt) <= MAX_SALT_BYTES and salt == cache_salt(ours, group), "a restart changes nothing"
        assert cache_key_id(ours) == cache_key_id(ours) != cache_key_id(ours + b"x")


def test_the_file_of_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"0123456789abcdef\n")
    assert read(path) == b"0123456789abcdef"
    assert read(None) == b""
    path.write_bytes(b" short \n")
    with pytest.raises(OSError, match=f"secret: .* has 5 bytes; it must have at least {LEAST_BYTES}"):
        read(path)


async def over_grpc(made: Cluster, name: str, **fields: object) -> None:
    prompt = inference_pb2.Prompt(token_ids={"ids": PROMPT})
    request = inference_pb2.GenerateRequest(prompt=prompt, sampling={"max_tokens": 4, "seed": 0}, **fields)
    call = made.stub.Generate(request, metadata=(("authorization", f"Bearer {secret(name)}"),))
    tokens = [token async for response in call for token in response.token_ids]
    assert tokens == expected(PROMPT, 4), "a salt changes no token"


async def over_http(made: Cluster, name: str) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "seed": 0}
    answer = await made.http.post("/v1/completions", json=body, headers={"x-api-key": secret(name)})
    assert answer.status_code == 200


@pytest.mark.parametrize("ask", [over_grpc, over_http])
async def test_the_salt_goes_to_both_workers(made: Cluster, ask: Callable) -> None:
    salts: dict[str, bytes] = {}
    for name in TENANTS:
        await ask(made, name)
        [salts[name]] = {worker.submitted[-1].cache_salt for worker in made.workers}
    assert sharing(salts) == SHARING and all(salts.values())


async def test_a_retry_has_the_salt_of_the_first_attempt(cluster: Callable, keys: Path) -> None:
    workers = FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE)
    made = await cluster(*workers, api_keys=str(keys))
    for worker in made.decodes:
        worker.script.append(dies(after=2))
    await over_grpc(made, "lab")
    asked = [request for worker in made.workers for request in worker.submitted]
    assert {request.id.attempt for request in asked} >= {0, 1}
    assert len({request.cache_salt for request in asked}) == 1


async def test_the_router_expects_no_hits_from_another_tenants_prompt(made: Cluster) -> None:
    found = {}
    for name in ("alone", "other", "same", "lab"):
        await over_grpc(made, name, request_id=name)
        answer = await made.admin.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=name))
        found[name] = answer.placements[0].cached_tokens
    assert found == {"alone": 0, "other": 0, "same": 128, "lab": 0}


async def test_workers_are_told_which_key_it_is_and_never_the_key(cluster: Callable, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef")
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), secret=str(path))
    for worker in made.workers:
        [hello] = worker.hellos
        assert hello.cache_key_id == cache_key_id(b"0123456789abcdef")
        assert b"0123456789abcdef" not in hello.SerializeToString()
