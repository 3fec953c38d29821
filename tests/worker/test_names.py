"""A prefill worker under a name whose address changes when it starts again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millrace_testing.dns import name_server
from millrace_testing.fake_router import FakePair, request
from millrace_testing.procs import SIM, Worker, workers
from millrace_testing.prometheus import free_port
from millrace_testing.sim import expected, prompt_of


class Elsewhere(Worker):
    """On another address of this machine."""

    def __init__(self, address: str, port: int, folder: Path) -> None:
        super().__init__("prefill", folder, (*SIM, f"host={address}", f"grpc_port={port}"))
        self._host, self._port = address, port

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"


async def test_decode_worker_reads_from_the_new_address(tmp_path: Path) -> None:
    async with name_server() as dns, workers(tmp_path, "decode") as [decode]:
        port = free_port()
        for round_, address in enumerate(("127.0.0.2", "127.0.0.3")):
            prefill, prompt = Elsewhere(address, port, tmp_path), prompt_of(300 + round_)
            await prefill.start()
            await prefill.ready()
            dns.addresses["prefill.test"] = address
            async with FakePair(prefill, decode) as pair, asyncio.timeout(120):
                pair.source.address = dns.target("prefill.test", port)
                one = pair.submit(request(prompt))
                end = await pair.to_decode.finish(one)
                assert not end.failure.reason, end
                assert pair.to_decode.tokens(one) == expected(prompt, 8)
            await prefill.process.stop(0.0)
            del dns.addresses["prefill.test"]
            await prefill.close()
        await decode.whole()
