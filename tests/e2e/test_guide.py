"""The commands of docs/how-to for the router's admin port, run as written, plain and with mutual TLS."""

import asyncio
import re
import shlex
import shutil
from pathlib import Path

import pytest
from millrace_chart.render import find_helm
from millrace_cli.cluster import ClusterSpec
from millrace_common.tls_config import Tls
from millrace_testing.certificates import Authority
from millrace_testing.charts import of_kind, rendered
from millrace_testing.inside_cluster import InsideCluster
from millrace_testing.paths import ROOT
from millrace_testing.prometheus import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine"),
]
GUIDE = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "how-to").glob("*.md")))
PLAIN = sorted(set(re.findall(r"`(curl (?:-H '[^']*' )?(?:-X POST )?127\.0\.0\.1:8001/[^`]+)`", GUIDE)))


async def shell(command: str, folder: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command), cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_every_command_is_answered(tmp_path: Path) -> None:
    port = free_port()
    spec = ClusterSpec(
        engine="sim", ports={"admin_http": port}, worker_set=(f"profile_dir={tmp_path}", "served_name=tiny")
    )
    async with InsideCluster(spec) as cluster:
        ask = f"curl -si {cluster.http_url}/v1/completions -H 'Content-Type: application/json'"
        _, answer = await shell(f'{ask} -d \'{{"model": "tiny", "prompt": "a", "max_tokens": 2}}\'', tmp_path)
        (request,) = re.findall(r"x-request-id: (\S+)", answer, re.IGNORECASE)
        decode = cluster.address("decode-0", "grpc")  # a worker's name is its pod's, where there are pods
        assert len(PLAIN) >= 5
        for command in PLAIN:
            here = command.replace(":8001", f":{port}").replace("REQUEST_ID", request).replace("POD", decode)
            code, output = await shell(f"{here} --fail-with-body -s", tmp_path)
            refused = command.endswith("/start_profile") and "a simulated engine has nothing to profile" in output
            assert code == 0 or refused, f"{command}: {output}"


@pytest.mark.skipif(find_helm() is None, reason="no helm here: `make setup` could not install it (npm)")
async def test_names_in_a_certificate_are_those_that_the_guide_uses(tmp_path: Path) -> None:
    (certificate,) = (
        it for it in of_kind(rendered("tls"), "Certificate") if it["metadata"]["name"].endswith("-router")
    )
    roles = ("millrace-router", "millrace-worker", "millrace-admin")  # all processes here have this certificate
    names = (*certificate["spec"]["dnsNames"], *certificate["spec"]["ipAddresses"], *roles)
    authority, port = Authority(), free_port()
    files = authority.tls(tmp_path, *names, require_client_cert=True, server_name="localhost")
    (command,) = re.findall(r"`(curl --cacert [^`]*:8001/)…`", re.sub(r"\s+", " ", GUIDE))
    spec = ClusterSpec(engine="sim", ports={"admin_http": port}, tls=Tls.model_validate(files))
    async with InsideCluster(spec) as cluster:
        code, output = await shell(f"{command.replace(':8001', f':{port}')}workers --fail-with-body -s", tmp_path)
        assert code == 0 and "ROLE_DECODE" in output, output
        tls = "--tls-ca ca.crt --tls-cert tls.crt --tls-key tls.key"
        millrace = shutil.which("millrace", path=f"{ROOT / '.venv' / 'bin'}") or "millrace"
        code, output = await shell(f"{millrace} workers --address {cluster.admin_address} {tls}", tmp_path)
        assert code == 0 and "decode" in output, output
