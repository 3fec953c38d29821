"""A prefill worker under a name whose address changes when it starts again."""

from millrace_testing.dns import name_server
from millrace_testing.fake_router import FakePair, request
from millrace_testing.inside import inside
from millrace_testing.procs import SIM
from millrace_testing.prometheus import free_port
from millrace_testing.sim import expected, prompt_of


async def test_decode_worker_reads_from_the_new_address() -> None:
    async with name_server() as dns, inside("decode") as [decode]:
        port = free_port()
        for round_, address in enumerate(("127.0.0.2", "127.0.0.3")):
            prompt = prompt_of(300 + round_)
            async with inside("prefill", sets=(*SIM, f"host={address}", f"grpc_port={port}")) as [prefill]:
                dns.addresses["prefill.test"] = address
                async with FakePair(prefill, decode) as pair:
                    pair.source.address = dns.target("prefill.test", port)
                    one = pair.submit(request(prompt))
                    end = await pair.to_decode.finish(one)
                    assert not end.failure.reason, end
                    assert pair.to_decode.tokens(one) == expected(prompt, 8)
                del dns.addresses["prefill.test"]
        await decode.whole()
