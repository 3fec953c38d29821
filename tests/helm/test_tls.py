"""Certificates of a release: who is named in which, and what the processes make of them."""

import base64
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_chart.render import CHART, EDITED, NAMESPACE, RELEASE, Object, objects, presets, run
from millrace_common.tls_config import Tls
from millrace_rpc.access import MAY, Access
from millrace_rpc.client import channel
from millrace_rpc.server import Server
from millrace_rpc.tls import Identity
from millrace_testing.charts import VARIANTS, config_of, of_kind, pods, rendered

pytestmark = pytest.mark.helm

ROLES = ("router", "worker", "admin")
SUFFIX = f"{NAMESPACE}.svc"
LOOKUP = 'lookup "v1" "Secret" .root.Release.Namespace .name'


def secrets(items: Iterable[Object]) -> dict[str, dict[str, bytes]]:
    """Those with certificates, by name."""
    found = {it["metadata"]["name"]: it["data"] for it in of_kind(items, "Secret") if "tls.crt" in it["data"]}
    return {name: {key: base64.b64decode(text) for key, text in data.items()} for name, data in found.items()}


def names(certificate: bytes) -> set[str]:
    parsed = x509.load_pem_x509_certificate(certificate)
    alternative = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, alternative.get_values_for_type(x509.IPAddress))
    return {*alternative.get_values_for_type(x509.DNSName), *addresses}


@pytest.mark.parametrize("mode", ["generated", "certManager"])
def test_each_role_has_a_name_of_its_own_which_every_process_knows(mode: str) -> None:
    items = rendered("cpu-tiny", f"tls.mode={mode}")
    if mode == "generated":
        named = {name: names(data["tls.crt"]) for name, data in secrets(items).items() if not name.endswith("-ca")}
        assert all("127.0.0.1" in found for found in named.values()), "port-forward and exec"
    else:
        issued = [it["spec"] for it in of_kind(items, "Certificate") if not it["spec"].get("isCA")]
        for spec in issued:
            assert {"server auth", "client auth"} <= set(spec["usages"]), "each calls others and is called"
            assert spec["privateKey"]["rotationPolicy"] == "Always" and "127.0.0.1" in spec["ipAddresses"]
        named = {it["secretName"]: set(it["dnsNames"]) for it in issued}
    assert named.keys() == {f"demo-millrace-{role}-tls" for role in ROLES}
    sections = [config_of(items, f"demo-millrace-{name}")["tls"] for name in ("router", "prefill", "decode")]
    assert sections[0] == sections[1] == sections[2] and sections[0]["require_client_cert"] is True
    for role in ROLES:
        (peer,) = sections[0]["peers"][role]
        having = [name for name, dns in named.items() if peer in dns]
        assert having == [f"demo-millrace-{role}-tls"] and peer.endswith(SUFFIX), "no other release has it"
    assert sections[0]["server_name"] in named["demo-millrace-worker-tls"]


async def test_generated_certificates_work(tmp_path: Path) -> None:
    """A worker's port with the rendered configuration, and callers with each certificate of the release."""
    items = rendered("cpu-tiny", "tls.mode=generated")
    folder = "/etc/millrace/tls"

    def tls_of(role: str) -> Tls:
        data = secrets(items)[f"demo-millrace-{role}-tls"]
        place = tmp_path / role
        place.mkdir(exist_ok=True)
        for key, content in data.items():
            (place / key).write_bytes(content)
        text = json.dumps(config_of(items, "demo-millrace-decode")["tls"])
        assert folder in text
        return Tls.model_validate_json(text.replace(folder, str(place)))

    class Worker(worker_pb2_grpc.WorkerServiceServicer):
        async def GetInfo(self, request: Any, context: Any) -> worker_pb2.WorkerInfo:
            return worker_pb2.WorkerInfo(epoch="e")

        async def FreezeGc(self, request: Any, context: Any) -> worker_pb2.FreezeGcResponse:
            return worker_pb2.FreezeGcResponse(processes=1)

    ours = tls_of("worker")
    server = Server(["millrace.v1.WorkerService"], [Access(ours, b"")])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server.grpc)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0', Identity(ours))}"
    try:
        for role in ROLES:
            async with channel(address, Identity(tls_of(role))) as ch:
                stub = worker_pb2_grpc.WorkerServiceStub(ch)
                assert (await stub.GetInfo(worker_pb2.GetInfoRequest())).epoch == "e"
                try:
                    await stub.FreezeGc(worker_pb2.FreezeGcRequest())
                    assert role in MAY["/millrace.v1.WorkerService"]
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAUTHENTICATED and role == "worker"
    finally:
        await server.stop(0)


def test_upgrade_keeps_certificates_and_issues_missing_ones(tmp_path: Path) -> None:
    """`helm template` sees no cluster, so the chart's look at it is replaced by a value."""
    chart = tmp_path / "millrace"
    shutil.copytree(CHART, chart)
    helpers = chart / "templates" / "_names.tpl"
    text = helpers.read_text()
    assert text.count(LOOKUP) == 1
    helpers.write_text(text.replace(LOOKUP, 'dict "data" (index .root.Values.global.known .name)'))

    def render(known: dict[str, Any]) -> dict[str, Any]:
        values = tmp_path / "values.json"
        values.write_text(json.dumps({"global": {"known": known}, "tls": {"mode": "generated"}}))
        arguments = ["template", RELEASE, str(chart), "--namespace", NAMESPACE, "--kube-version", "1.31.0"]
        found = objects(run([*arguments, "--set", EDITED, "--values", str(values)]))
        return {it["metadata"]["name"]: it["data"] for it in of_kind(found, "Secret")}

    first = render({})
    assert render(first) == first
    for name in ("demo-millrace-ca", "demo-millrace-worker-tls", "demo-millrace-secret"):
        again = render({other: data for other, data in first.items() if other != name})
        changed = {other for other in first if again[other] != first[other]}
        certificates = {f"demo-millrace-{role}-tls" for role in ROLES}
        assert changed == ({name, *certificates} if name == "demo-millrace-ca" else {name})
        signers = {data["ca.crt"] for other, data in again.items() if other in certificates}
        assert signers == {again["demo-millrace-ca"]["tls.crt"]}


@pytest.mark.parametrize("name", presets())
def test_presets_for_gpus_have_tls_and_need_nothing_of_the_cluster_for_it(name: str) -> None:
    items = rendered(name)
    assert ("tls" in config_of(items, "demo-millrace-router")) is name.startswith("h200")
    assert not [it for it in items if it["apiVersion"].startswith("cert-manager")]


@pytest.mark.parametrize("variant", [None, *(name for name in VARIANTS if name in ("tls", "issuer", "secrets"))])
def test_clients_of_generated_certificates_need_none(variant: str | None) -> None:
    """Elsewhere whoever runs the authority decides who is a client."""
    items = rendered(variant) if variant else rendered("cpu-tiny", "tls.mode=generated")
    public = config_of(items, "demo-millrace-router").get("public_tls")
    assert (public is not None) is (variant in (None, "secrets"))
    assert not public or "require_client_cert" not in public
    (test,) = (spec for where, spec in pods(items) if where == "Pod/demo-millrace-test")
    arguments = test["containers"][0]["args"]
    assert ("--served" if variant == "secrets" else "--ca") in arguments
    assert ("--cert" in arguments) is (public is None)
    (mounted,) = (volume["secret"] for volume in test["volumes"] if volume["name"] == "tls")
    if not public or variant:
        return
    assert [item["key"] for item in mounted["items"]] == ["ca.crt"], "no key of a router"
