"""The deployment's identity: of this router at its workers, and of operators at its admin ports."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from millrace.v1 import admin_pb2, admin_pb2_grpc
from millrace_common.reasons import Reason
from millrace_common.tls_config import PEERS, Tls
from millrace_router.config import RouterConfig
from millrace_rpc.access import HEADER, MAY, Access, token
from millrace_rpc.client import channel
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_rpc.tls import Identity
from millrace_testing.certificates import Authority
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected
from router.harness import Cluster

SECRET = b"of this deployment: 7c1f"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    return str(path)


def known_to_us(*roles: int) -> list[FakeWorker]:
    made = [FakeWorker(role) for role in roles]
    for worker in made:
        worker.access = Access(None, SECRET)
    return made


async def test_a_router_shows_its_secret_on_every_call(cluster: Callable, secret: str) -> None:
    made: Cluster = await cluster(*known_to_us(PREFILL, DECODE), secret=secret)
    assert (await made.generate([1, 2, 3], sampling={"max_tokens": 4})).tokens() == expected([1, 2, 3], 4)


@pytest.mark.parametrize("theirs", ["", "of another deployment"])
async def test_a_worker_that_refuses_this_router_is_not_routable_and_said_once(
    cluster: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: str
) -> None:
    (tmp_path / "other").write_text(theirs)
    settings = {"secret": str(tmp_path / "other")} if theirs else {}
    prefill, decode = known_to_us(PREFILL, DECODE)
    with caplog.at_level(logging.INFO):
        made: Cluster = await cluster(prefill, decode, wait=False, **settings)
        tries = made.router.registry.workers[prefill.address]
        await made.until(lambda: tries._pause > 0.4)  # it has tried again, and again
        await made.until(lambda: all("secret" in status.detail for status in made.router.registry.status()))
    for status in made.router.registry.status():
        why = "has another secret" if theirs else "sent no token: it has no `secret`"
        assert not status.routable and not status.reachable and why in status.detail
    said = [record for record in caplog.records if "refuses this router" in record.message]
    assert len(said) == 2 and all(record.levelno == logging.ERROR and "secret" in record.message for record in said)
    assert not [record for record in caplog.records if "ejected" in record.message]


async def ask_grpc(address: str, identity: Identity | None, sent: str) -> Reason | None:
    async with channel(address, identity, sent) as ch:
        try:
            await admin_pb2_grpc.AdminStub(ch).ListWorkers(admin_pb2.ListWorkersRequest())
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).reason
        return None


def methods() -> list[Any]:
    return list(admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods)


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.name)
async def test_every_method_of_operators_asks_who_calls(cluster: Callable, secret: str, method: Any) -> None:
    made: Cluster = await cluster(admin="0.0.0.0:0", secret=secret, wait=False)
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with channel(f"127.0.0.1:{made.router.ports['admin']}") as ch:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ch.unary_unary(path)(b"")
    assert from_rpc_error(caught.value).reason is Reason.UNAUTHENTICATED


async def test_admin_ports_that_others_reach_want_the_token(cluster: Callable, secret: str) -> None:
    made: Cluster = await cluster(admin="0.0.0.0:0", admin_http="0.0.0.0:0", secret=secret, wait=False)
    ports = made.router.ports
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['admin_http']}", timeout=None) as http:
        for sent, good in (("", False), (token(SECRET + b"x"), False), (token(SECRET), True)):
            reason = await ask_grpc(f"127.0.0.1:{ports['admin']}", None, sent)
            assert reason is (None if good else Reason.UNAUTHENTICATED)
            for verb, path in (
                ("GET", "/workers"),
                ("POST", "/flush_cache"),
                ("POST", "/drain/x"),
                ("GET", "/nothing"),
                ("GET", "/"),
            ):
                answer = await http.request(verb, path, headers={HEADER: sent} if sent else {})
                assert (answer.status_code != 401) is good, path
                assert good or "secret" in answer.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200


async def test_admin_ports_of_this_machine_alone_want_nothing(cluster: Callable, secret: str) -> None:
    made: Cluster = await cluster(secret=secret, wait=False)
    assert await ask_grpc(f"127.0.0.1:{made.router.ports['admin']}", None, "") is None


async def test_with_mutual_tls_operators_have_a_certificate_of_theirs(cluster: Callable, tmp_path: Path) -> None:
    authority = Authority()
    settings = authority.tls(tmp_path / "router", require_client_cert=True)
    made: Cluster = await cluster(wait=False, tls=settings)
    ports = made.router.ports
    cases = {PEERS["admin"][0]: True, PEERS["router"][0]: True, PEERS["worker"][0]: False, "team-a": False}
    for name, good in cases.items():
        tls = authority.tls(tmp_path / name, name)
        reason = await ask_grpc(f"127.0.0.1:{ports['admin']}", Identity(Tls.model_validate(tls)), "")
        assert reason is (None if good else Reason.UNAUTHENTICATED), name
        context = ssl.create_default_context(cafile=str(tls["ca"]))
        context.load_cert_chain(str(tls["cert"]), str(tls["key"]))
        url = f"https://127.0.0.1:{ports['admin_http']}"
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=None) as http:
            answers = await asyncio.gather(*(http.get("/workers") for _ in range(2)))
            assert all((answer.status_code == 200) is good for answer in answers), name
            assert good or all("tls.peers.admin" in answer.json()["error"]["message"] for answer in answers)


WORKERS = "/millrace.v1.WorkerService/"


@pytest.mark.parametrize(
    ("method", "allowed"),
    [
        (WORKERS + "Drain", {"router", "admin"}),
        (WORKERS + "GetInfo", {"router", "admin", "worker"}),
        (WORKERS + "WatchLoad", {"router", "admin", "worker"}),
        ("/millrace.v1.PrefillService/Link", {"router", "worker"}),
        ("/millrace.v1.DecodeService/Link", {"router", "worker"}),
        ("/millrace.v1.KvService/ReadInfo", {"worker"}),
        ("/millrace.v1.Unknown/Call", set()),
    ],
)
def test_a_method_has_its_own_callers_or_those_of_its_service(method: str, allowed: set[str]) -> None:
    access = Access(Tls.model_validate({"cert": "c", "key": "k", "ca": "a", "require_client_cert": True}), b"")
    for peer, names in PEERS.items():
        with contextlib.nullcontext() if peer in allowed else pytest.raises(MillraceError, match="is for"):
            access.check(method, names, "")


@pytest.mark.parametrize("key", ["admin", "admin_http"])
def test_admin_ports_that_others_reach_need_a_secret(key: str) -> None:
    for address in ("0.0.0.0:50052", "[::]:0", "10.0.0.1:1"):
        with pytest.raises(ValueError, match="secret: required with"):
            RouterConfig.model_validate({"model": "m", key: address})
        assert RouterConfig.model_validate({"model": "m", key: address, "secret": "s"}).secret is not None


def test_every_service_inside_a_deployment_has_its_callers() -> None:
    """And no method is listed that does not exist any more."""
    from millrace.v1 import decode_pb2, kv_pb2, prefill_pb2, worker_pb2

    files = (admin_pb2, decode_pb2, kv_pb2, prefill_pb2, worker_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    assert {f"/{service.full_name}" for service in services} <= MAY.keys()
    known = {f"/{it.full_name}" for it in services}
    known |= {f"/{it.full_name}/{method.name}" for it in services for method in it.methods}
    assert MAY.keys() <= known
