"""What `helm test` runs, against real processes."""

import asyncio
import sys
from pathlib import Path

import pytest
from millrace_chart.render import CHART
from millrace_cli.cluster import ClusterSpec
from millrace_cluster import load
from millrace_common.tls_config import Tls
from millrace_rpc.http_server import HttpServer
from millrace_rpc.tls import Identity
from millrace_testing.certificates import Authority
from millrace_testing.inside_cluster import InsideCluster
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytestmark = pytest.mark.e2e
SCRIPT = CHART / "files" / "helm_test.py"
KEYS = "keys: [{name: test, key: a-key-for-the-test-of-32-characters}]"


async def run(url: str, *arguments: str, key: str = "") -> tuple[int, str]:
    command = [str(SCRIPT), "--router", url, "--model", "tiny", "--timeout", "20", *arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env={"MILLRACE_API_KEY": key},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_helm_test_passes_only_with_a_key_and_a_transfer(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    spec = ClusterSpec(engine="sim", worker_set=("served_name=tiny",), router_set=(f"api_keys={keys}",))
    async with InsideCluster(spec) as cluster:
        decode = ("--decode", cluster.address("decode-0", "metrics"))
        code, output = await run(cluster.http_url, *decode, key="a-key-for-the-test-of-32-characters")
        assert code == 0 and "bytes of KV read" in output, output
        code, output = await run(cluster.http_url, *decode, key="another")
        assert code == 1 and "401" in output, output
        nobody = ("--decode", cluster.address("prefill-0", "metrics"), "--timeout", "1")
        code, output = await run(cluster.http_url, *nobody, key="a-key-for-the-test-of-32-characters")
        assert code == 1 and "no decode worker has read any KV page" in output, output
        code, output = await run(cluster.http_url, "--no-transfer", key="a-key-for-the-test-of-32-characters")
        assert code == 0 and output.startswith("ok: 8 tokens"), "as for a release of unified workers"


async def test_helm_test_knows_a_public_certificate_by_itself(tmp_path: Path) -> None:
    """It names the Gateway and not the Service, and its secret has no authority."""
    web, other = (Authority().tls(tmp_path / name, "llm.example.org") for name in ("web", "other"))

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"usage": {"completion_tokens": 8}})

    server = HttpServer(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
    url = f"https://127.0.0.1:{server.start('127.0.0.1:0', Identity(Tls.model_validate(web)))}"
    try:
        for shown, passes in ((web, True), (other, False)):
            limit = f"--timeout={20 if passes else 1}"
            code, output = await run(url, "--no-transfer", "--served", str(shown["cert"]), limit)
            assert (code == 0) is passes, output
        assert await asyncio.to_thread(load.request, url, 4) == "a stream that did not end", "no error of TLS either"
    finally:
        await server.stop()
