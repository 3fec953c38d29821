"""Who may call a worker's port: every method of every service, over plain connections and TLS."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import decode_pb2, kv_pb2, prefill_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_common.tls_config import Tls
from millrace_rpc.access import token
from millrace_rpc.client import channel
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_rpc.tls import Identity
from millrace_testing.certificates import Authority
from millrace_testing.inside import Inside, inside
from millrace_testing.procs import SIM

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = b"of this deployment: 7c1f"
NAMES = {"router": "millrace-router", "worker": "millrace-worker", "admin": "millrace-admin", "client": "team-a"}
EVERYBODY_INSIDE = {"router", "worker", "admin"}
MAY = {  # service, or method, to those whose certificates it takes
    "WorkerService": {"router", "admin"},
    "WorkerService/GetInfo": EVERYBODY_INSIDE,
    "WorkerService/WatchLoad": EVERYBODY_INSIDE,
    "PrefillService": {"router", "worker"},
    "DecodeService": {"router", "worker"},
    "KvService": {"worker"},
}
ROLES = {"prefill": (prefill_pb2, kv_pb2, worker_pb2), "decode": (decode_pb2,)}  # what both have is asked of one
CASES = [
    pytest.param(role, it, id=f"{role}-{it.containing_service.name}.{it.name}")
    for role, files in ROLES.items()
    for file in files
    for service in file.DESCRIPTOR.services_by_name.values()
    for it in service.methods
]


def may(method: Any) -> set[str]:
    service = method.containing_service.name
    return MAY.get(f"{service}/{method.name}") or MAY[service]


async def refusal(
    ch: grpc.aio.Channel, method: Any, metadata: tuple[tuple[str, str], ...] = ()
) -> MillraceError | None:
    """Why a call is refused for its caller; None: it is not. Its message has no fields, and so does nothing."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = "_".join("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
    request: Any = iter([b"\x0a\x00"]) if method.client_streaming else _harmless(method)
    call = getattr(ch, kind)(path)(request, metadata=metadata or None)
    try:
        if method.server_streaming:
            # a stream whose requests end together with it may end its reading without an error
            if await call.read() is grpc.aio.EOF and await call.code() is grpc.StatusCode.UNAUTHENTICATED:
                return MillraceError(Reason.UNAUTHENTICATED, await call.details())
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INTERNAL:  # gRPC's own, when a message is sent as its stream ends
            return await refusal(ch, method, metadata)
        found = from_rpc_error(error)
        return found if found.reason is Reason.UNAUTHENTICATED else None
    return None


def _harmless(method: Any) -> bytes:
    """A drain would be carried out: -1 s is refused."""
    return worker_pb2.DrainRequest(timeout_s=-1.0).SerializeToString() if method.name == "Drain" else b""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Inside]]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "secret").write_bytes(SECRET)
    async with inside(*ROLES, sets=[*SIM, f"secret={folder / 'secret'}"]) as started:
        yield dict(zip(ROLES, started, strict=True))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def identities(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder = tmp_path_factory.mktemp("identities")
    return {name: Identity(Tls.model_validate(authority.tls(folder / name, dns))) for name, dns in NAMES.items()}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mutual(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Inside]]:
    """They have a secret too: certificates go first."""
    folder = tmp_path_factory.mktemp("mutual")
    (folder / "secret").write_bytes(SECRET)
    tls = authority.tls(folder / "tls", "127.0.0.1", NAMES["worker"], require_client_cert=True)
    sets = [*SIM, f"secret={folder / 'secret'}", *(f"tls.{key}={value}" for key, value in tls.items())]
    async with inside(*ROLES, sets=sets) as started:
        yield dict(zip(ROLES, started, strict=True))


@pytest.mark.parametrize(("role", "method"), CASES)
async def test_without_tls_every_method_wants_the_token_of_the_secret(
    plain: dict[str, Inside], role: str, method: Any
) -> None:
    address = plain[role].address
    async with channel(address) as nobody, channel(address, token=token(SECRET)) as ours:
        assert await refusal(ours, method) is None
        for metadata, words in (
            ((), "secret"),
            ((("authorization", token(SECRET + b"x")),), "secret"),
            ((("authorization", token(SECRET)[:-1]),), "secret"),
            ((("authorization", "Bearer "),), "secret"),
        ):
            refused = await refusal(nobody, method, metadata)
            assert refused is not None and words in refused.message, metadata
            assert SECRET.decode() not in refused.message and token(SECRET) not in refused.message


@pytest.mark.parametrize(("role", "method"), CASES)
async def test_with_mutual_tls_a_certificate_opens_what_its_role_needs(
    mutual: dict[str, Inside], identities: dict[str, Identity], role: str, method: Any
) -> None:
    for name, identity in identities.items():
        async with channel(mutual[role].address, identity, token(SECRET)) as ch:
            refused = await refusal(ch, method)
            assert (refused is None) is (name in may(method)), (name, refused)
            assert refused is None or (NAMES[name] in refused.message and "tls.peers" in refused.message)


async def test_health_needs_nothing(plain: dict[str, Inside]) -> None:
    for worker in plain.values():
        async with channel(worker.address) as ch:
            await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest())


async def test_certificate_may_have_several_names_and_others_be_configured(
    authority: Authority, tmp_path: Path
) -> None:
    tls = authority.tls(tmp_path / "tls", "127.0.0.1", require_client_cert=True)
    sets = [*SIM, *(f"tls.{key}={value}" for key, value in tls.items()), "tls.peers={router: [a.b.svc, c.b.svc]}"]
    info = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name["Drain"]
    async with inside("decode", sets=sets) as [worker]:
        for names, good in (
            (("c.b.svc", "localhost"), True),
            ((NAMES["router"],), False),
            ((NAMES["admin"],), True),  # what is not configured has its default
            (("c.b.svc.example.org",), False),
        ):
            identity = Identity(Tls.model_validate(authority.tls(tmp_path / names[0], *names)))
            async with channel(worker.address, identity) as ch:
                assert (await refusal(ch, info) is None) is good, names
