"""TLS between our servers and clients: who gets in, and new files while connections are open."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_common.config import Config, ConfigError
from millrace_common.config import load as load_config
from millrace_common.tls_config import Tls
from millrace_rpc.client import channel
from millrace_rpc.server import LIVENESS, NOT_SERVING, SERVING, Server
from millrace_rpc.tls import Identity
from millrace_testing.certificates import Authority
from router.harness import Clock
from rpc.conftest import NAME, Inference

REQUEST = inference_pb2.TokenizeRequest()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def identity(settings: dict[str, object], **options: object) -> Identity:
    return Identity(Tls.model_validate(settings), **options)


@contextlib.asynccontextmanager
async def serving(server_identity: Identity) -> AsyncIterator[str]:
    server = Server([NAME])
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server.grpc)
    port = await server.start("127.0.0.1:0", server_identity)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def ask(address: str, client: Identity | None) -> list[int] | grpc.StatusCode:
    async with channel(address, client) as ch:
        try:
            answer = await inference_pb2_grpc.InferenceStub(ch).Tokenize(REQUEST)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return list(answer.token_ids)


async def test_mutual_tls_lets_in_whom_the_authority_signed(authority: Authority, tmp_path: Path) -> None:
    server = identity(authority.tls(tmp_path / "server", require_client_cert=True))
    good = identity(authority.tls(tmp_path / "client"))
    nameless = identity({"ca": good.tls.ca})
    stranger = identity(Authority().tls(tmp_path / "stranger") | {"ca": good.tls.ca})
    suspicious = identity(authority.tls(tmp_path / "suspicious") | {"ca": Authority().tls(tmp_path / "other")["ca"]})
    async with serving(server) as address:
        assert await ask(address, good) == [1, 2]
        for client in (None, nameless, stranger, suspicious):
            assert await ask(address, client) is grpc.StatusCode.UNAVAILABLE


async def test_probes_without_a_certificate_have_a_port_of_health_alone(authority: Authority, tmp_path: Path) -> None:
    server = Server([NAME])
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server.grpc)
    plain = f"127.0.0.1:{await server.start_health('127.0.0.1:0')}"
    await server.start("127.0.0.1:0", identity(authority.tls(tmp_path / "server", require_client_cert=True)))
    try:
        async with channel(plain) as ch:
            stub = health_pb2_grpc.HealthStub(ch)
            for serving in (False, True):
                server.set_serving(serving)
                for service, expected in (("", serving), (NAME, serving), (LIVENESS, True)):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                    assert answer.status == (SERVING if expected else NOT_SERVING)
        assert await ask(plain, None) is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)


async def test_a_worker_called_by_its_address_has_the_configured_name(authority: Authority, tmp_path: Path) -> None:
    server = identity(authority.tls(tmp_path / "server", "worker.millrace.internal"))
    async with serving(server) as address:
        assert await ask(address, identity({"ca": server.tls.ca})) is grpc.StatusCode.UNAVAILABLE
        named = identity({"ca": server.tls.ca, "server_name": "worker.millrace.internal"})
        assert await ask(address, named) == [1, 2]


async def test_new_certificates_are_used_and_open_streams_go_on(authority: Authority, tmp_path: Path) -> None:
    clock, reloads = Clock(), []
    server = identity(authority.tls(tmp_path / "server"), clock=clock, on_reload=reloads.append)
    client = identity({"ca": server.tls.ca}, clock=clock)
    async with serving(server) as address, channel(address, client) as first:
        stream = inference_pb2_grpc.InferenceStub(first).Generate(inference_pb2.GenerateRequest())
        assert (await stream.read()).text == "first"
        successor = Authority()
        successor.tls(tmp_path / "server")
        clock.now += 10
        assert (await stream.read()).text.startswith("x")
        assert await ask(address, client) == [1, 2], "the client reads the new authority too"
        assert reloads == ["ok"]
        old = identity({"ca": authority.tls(tmp_path / "old")["ca"]})
        assert await ask(address, old) is grpc.StatusCode.UNAVAILABLE
        assert (await stream.read()).text.startswith("x")
        stream.cancel()


async def test_files_that_do_not_fit_are_not_used(authority: Authority, tmp_path: Path) -> None:
    clock, reloads = Clock(), []
    server = identity(authority.tls(tmp_path / "server"), clock=clock, on_reload=reloads.append)
    other = authority.tls(tmp_path / "other")
    async with serving(server) as address:
        Path(server.tls.key).write_bytes(Path(str(other["key"])).read_bytes())
        clock.now += 10
        assert await ask(address, identity({"ca": server.tls.ca})) == [1, 2]
        assert reloads == ["failed"]


async def https(port: int, settings: dict[str, object]) -> str:
    """The serial number of the server's certificate."""
    context = ssl.create_default_context(cafile=str(settings["ca"]))
    if "cert" in settings:
        context.load_cert_chain(str(settings["cert"]), str(settings["key"]))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    with contextlib.closing(writer):
        assert await reader.readexactly(2) == b"ok"  # under TLS 1.3 a client learns only here that it was refused
        return writer.get_extra_info("peercert")["serialNumber"]


async def test_https_context_follows_the_files(authority: Authority, tmp_path: Path) -> None:
    clock = Clock()
    server = identity(authority.tls(tmp_path / "server", require_client_cert=True), clock=clock)
    client = authority.tls(tmp_path / "client")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"ok")
        await writer.drain()
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server.server_context())
    port = listener.sockets[0].getsockname()[1]
    with contextlib.closing(listener):
        before = await https(port, client)
        assert await https(port, client) == before
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await https(port, {"ca": client["ca"]})
        successor = Authority()
        successor.tls(tmp_path / "server")
        clock.now += 10
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await https(port, client)
        assert await https(port, successor.tls(tmp_path / "client")) != before


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cert": "a"}, "cert and key go together"),
        ({"require_client_cert": True}, "require_client_cert needs ca"),
        ({"colour": "red"}, "tls.colour: unknown key"),
    ],
)
def test_sections_that_make_no_sense(values: dict[str, object], words: str) -> None:
    class Process(Config):
        tls: Tls | None = None

    with pytest.raises(ConfigError, match=words):
        load_config(Process, None, [f"tls.{key}={value}" for key, value in values.items()])


def test_files_that_cannot_be_used_at_the_start(authority: Authority, tmp_path: Path) -> None:
    settings = authority.tls(tmp_path)
    other = authority.tls(tmp_path / "other")
    cases = {
        "cannot read": {"cert": str(tmp_path / "none"), "key": settings["key"]},
        "no certificate with its key": {"cert": settings["cert"], "key": other["key"]},
        "holds no certificates": {"ca": settings["key"]},
    }
    secret = Path(str(settings["key"])).read_text().splitlines()[1]
    for words, values in cases.items():
        with pytest.raises(OSError, match=words) as caught:
            identity(values)
        assert secret not in str(caught.value)
    with pytest.raises(OSError, match="a server needs a certificate"):
        identity({"ca": settings["ca"]}).server_credentials()
    assert "BEGIN" not in repr(identity(settings)._files.get())
