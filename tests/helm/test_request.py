"""What `helm test` runs, against real processes."""

import asyncio
import sys
from pathlib import Path

import pytest
from millrace_chart.render import CHART
from millrace_cli.cluster import ClusterSpec
from millrace_testing.inside_cluster import InsideCluster

pytestmark = pytest.mark.e2e
SCRIPT = CHART / "files" / "helm_test.py"
KEYS = "keys: [{name: test, key: a-key-for-the-test-of-32-characters}]"


async def run(cluster: InsideCluster, *arguments: str, key: str = "") -> tuple[int, str]:
    command = [str(SCRIPT), "--router", cluster.http_url, "--model", "tiny", "--timeout", "20", *arguments]
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
        code, output = await run(cluster, *decode, key="a-key-for-the-test-of-32-characters")
        assert code == 0 and "bytes of KV read" in output, output
        code, output = await run(cluster, *decode, key="another")
        assert code == 1 and "401" in output, output
        nobody = ("--decode", cluster.address("prefill-0", "metrics"), "--timeout", "1")
        code, output = await run(cluster, *nobody, key="a-key-for-the-test-of-32-characters")
        assert code == 1 and "no decode worker has read any KV page" in output, output
        code, output = await run(cluster, "--no-transfer", key="a-key-for-the-test-of-32-characters")
        assert code == 0 and output.startswith("ok: 8 tokens"), "as for a release of unified workers"
