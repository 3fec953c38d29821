"""A proxy of the environment is used for hosts outside alone."""

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace_cli import proxies
from millrace_rpc.client import channel
from millrace_rpc.server import Server

NAMES = [form for name in proxies.VARIABLES for form in (name, name.upper())]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*NAMES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("before", "after"), [({}, ""), ({"no_proxy": "a,b"}, "a,b,"), ({"NO_PROXY": "*"}, "*,")])
def test_loopback_is_spared_beside_what_was(name: str, before: dict[str, str], after: str) -> None:
    environment = {name: NOBODY, **before}
    proxies.spare_loopback(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == after + proxies.LOOPBACK
    assert f"{name} is set" in proxies.hint(environment)


def test_without_a_proxy_nothing_changes() -> None:
    environment = {"no_proxy": "a", "http_proxy": ""}
    proxies.spare_loopback(environment)
    assert environment == {"no_proxy": "a", "http_proxy": ""} and proxies.hint(environment) == ""


@pytest.mark.parametrize("address", ["http://127.0.0.1", "http://localhost", "http://[::1]"])
def test_http_clients_take_the_exemption(address: str, clean: pytest.MonkeyPatch) -> None:
    clean.setenv("http_proxy", NOBODY)
    proxies.spare_loopback()
    with httpx.Client(timeout=None) as client:
        assert client._transport_for_url(httpx.URL(address)) is client._transport
        assert client._transport_for_url(httpx.URL("http://example.com")) is not client._transport


@pytest.mark.parametrize("name", NAMES)
async def test_channel_of_ours_uses_no_proxy(name: str, clean: pytest.MonkeyPatch) -> None:
    clean.setenv(name, NOBODY)
    server = Server([])
    try:
        async with channel(f"127.0.0.1:{await server.start('127.0.0.1:0')}") as ch:
            answer = await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        await server.stop(0)
