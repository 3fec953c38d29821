"""Certificates that are replaced while streams run over every hop: of the same authority, and of another one with a
bundle of both between. Streams go on, new connections have the new certificates, and nothing is blamed.
"""

import asyncio
import ssl
from pathlib import Path

import pytest
from e2e.test_faults import expected, make_prompt
from millrace_cli.cluster import ClusterSpec
from millrace_common.tls_config import Tls
from millrace_rpc.tls import Identity
from millrace_testing.certificates import Authority
from millrace_testing.client import Answer, Client, collect, until
from millrace_testing.cluster import ControlledCluster
from millrace_testing.samples import total

pytestmark = [pytest.mark.long]

TOKENS = 4000  # 40 s of steps: until the test is over


class Rotation:
    """A cluster whose processes share a folder of certificates, and long streams through it."""

    def __init__(self, cluster: ControlledCluster, folder: Path, authority: Authority) -> None:
        self.cluster, self.folder = cluster, folder
        self.settings = authority.tls(folder / "client")

    async def rotate(self, authority: Authority, *trusts: Authority) -> None:
        """Write the files, and wait until every server has the new certificate for those who connect."""
        authority.tls(self.folder / "tls", trusts=trusts)
        self.settings = authority.tls(self.folder / "client", trusts=trusts)
        new = ssl.PEM_cert_to_DER_cert((self.folder / "tls" / "tls.crt").read_text().partition("\n\n")[0])
        for name in ("router", *self.cluster.spec.workers()):
            while await self._served(name) != new:
                await asyncio.sleep(0.1)

    async def _served(self, name: str) -> bytes | None:
        """The certificate that a process shows to one who connects now."""
        context = ssl.create_default_context(cafile=str(self.settings["ca"]))
        context.load_cert_chain(str(self.settings["cert"]), str(self.settings["key"]))
        context.set_alpn_protocols(["h2"])
        host, _, port = self.cluster.address(name).rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
        except ssl.SSLError:  # it has not read the new files
            return None
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found

    async def serves(self, seed: int) -> None:
        """A new client's request."""
        prompt, answer = make_prompt(seed, 200), Answer()
        async with self.client() as client:
            await follow(client, prompt, answer, 5)

    def client(self) -> Client:
        return Client(self.cluster.grpc_address, identity=Identity(Tls.model_validate(self.settings)))

    async def retries(self) -> float:
        port = (self.cluster.processes["router"].announced() or {})["metrics"]
        return await total(f"http://127.0.0.1:{port}", "millrace_retries_total")


async def follow(client: Client, prompt: list[int], answer: Answer, tokens: int) -> None:
    async for chunk in client.stream(prompt, max_tokens=tokens):
        collect(answer, chunk)
    assert answer.tokens == expected(prompt, tokens)


async def test_streams_go_on_while_certificates_are_replaced(tmp_path: Path) -> None:
    first, second = Authority(), Authority()
    tls = Tls.model_validate(first.tls(tmp_path / "tls", require_client_cert=True))
    logs, sets = tmp_path / "logs", {"worker_set": ("sim.step_s=0.01",), "router_set": ("metrics=127.0.0.1:0",)}
    spec = ClusterSpec(prefill=1, decode=2, engine="sim", log_dir=logs, tls=tls, **sets)
    async with ControlledCluster(spec) as cluster:
        rotation = Rotation(cluster, tmp_path, first)
        async with rotation.client() as client:
            prompts = [make_prompt(seed, 50) for seed in range(4)]
            answers = [Answer() for _ in prompts]
            streams = [
                asyncio.create_task(follow(client, prompt, answer, TOKENS))
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            steps = [(first,), (first, second), (second, first), (second,)]
            for number, (authority, *trusts) in enumerate(steps):
                await rotation.rotate(authority, *trusts)
                seen = [len(answer.tokens) for answer in answers]
                for seed in range(2):  # a prompt's pages go from worker to worker with the new certificate
                    await rotation.serves(100 + 10 * number + seed)
                await until(lambda: all(len(a.tokens) > n for a, n in zip(answers, seen, strict=True)), what="tokens")  # noqa: B023
                assert not any(stream.done() for stream in streams), "they ran through all of it"
            assert not await rotation.retries()
            lost = [line for line in log_of(cluster, "router").splitlines() if "lost" in line or "ejected" in line]
            assert not lost and "dropped worker" not in log_of(cluster, "decode-0") + log_of(cluster, "decode-1")
            await asyncio.gather(*streams)
        await cluster.restart("decode-0")
        await cluster.wait_routable()
        await rotation.serves(200)


def log_of(cluster: ControlledCluster, name: str) -> str:
    return (cluster.log_dir / f"{name}.log").read_text()
