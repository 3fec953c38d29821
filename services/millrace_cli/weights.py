"""`millrace weights`: one action on the weights of several workers at once, as a trainer does it between two steps."""

import asyncio
from collections.abc import Sequence

from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_rpc.client import channel, reply
from millrace_rpc.errors import MillraceError
from millrace_rpc.tls import Identity

from millrace_cli import probe
from millrace_cli.errors import CommandError


async def act(
    addresses: Sequence[str], order: worker_pb2.SetWeightsRequest, identity: Identity | None = None, token: str = ""
) -> None:
    """On all workers; each is reported. Raises CommandError when one has failed: the others have done it."""

    async def one(address: str) -> str:
        """Why it failed, or empty."""
        async with channel(address, identity, token) as ch:
            try:
                done = await reply(worker_pb2_grpc.WorkerServiceStub(ch).SetWeights(order))
            except MillraceError as error:
                wrong = await probe.misdirected(address, error.__cause__, "a worker's gRPC port")
                print(wrong or f"{address}: {error}")
                return address
            print(f"{address}: version {done.version or '(none)'}, {done.seconds:.1f} s")
            return ""

    failed = list(filter(None, await asyncio.gather(*map(one, addresses))))
    if failed:
        raise CommandError(f"{len(failed)} of {len(addresses)} workers failed: {', '.join(failed)}")
