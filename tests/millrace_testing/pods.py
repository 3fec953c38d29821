"""What Kubernetes does with a pod of a worker, with processes of this machine. The API server (KubeServer) tells
routers, and a pod's life is that of the chart (helm/millrace/templates/_worker.tpl):

1. the process starts; the pod is listed, and Ready when `grpc.health.v1` says SERVING
2. `delete`: the pod gets its deletionTimestamp, which routers see; the preStop hook sleeps; SIGTERM; the process has to
   end by itself, with exit code 0, within the grace period; the pod is no longer listed
"""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace_testing.kube_server import KubeServer, pod
from millrace_testing.procs import Worker

PRE_STOP_S = 0.3  # the chart's 15 s, in which load balancers of a whole cluster learn about it
GRACE_S = 30.0
PROBE_PERIOD_S, PROBE_TIMEOUT_S = 0.1, 5.0
SERVING = health_pb2.HealthCheckResponse.SERVING


class Pod:
    def __init__(self, server: KubeServer, worker: Worker, name: str, **labels: str) -> None:
        self.worker = worker
        self.name = name
        self._server = server
        self._object = pod(name, worker.address, ready=False, **labels)
        self._probe = asyncio.create_task(self._keep_probing())
        server.put(self._object)

    async def delete(self) -> None:
        self._object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self._server.put(self._object)
        await asyncio.sleep(PRE_STOP_S)
        self.worker.process.send(signal.SIGTERM)
        code = await asyncio.wait_for(self.worker.process.wait(), GRACE_S)
        assert code == 0, f"{self.name} ended with {code}:\n{self.worker.process.log_tail()}"
        self._server.delete(self._object)
        await self.close()

    async def close(self) -> None:
        self._probe.cancel()
        await asyncio.gather(self._probe, return_exceptions=True)
        await self.worker.close()

    async def _keep_probing(self) -> None:
        """The readiness probe: asks now and then, and takes no answer for a no."""
        condition = self._object["status"]["conditions"][0]
        stub = health_pb2_grpc.HealthStub(self.worker.channel)
        while True:
            ready = "False"
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
                ready = str(answer.status == SERVING)
            if condition["status"] != ready:
                condition["status"] = ready
                self._server.put(self._object)
            await asyncio.sleep(PROBE_PERIOD_S)


class Pods:
    """`async with Pods(server, folder, sets) as pods: first = await pods.start("prefill-0", "prefill")`"""

    def __init__(self, server: KubeServer, folder: Path, sets: Sequence[str]) -> None:
        self._server = server
        self._folder = folder
        self._sets = sets
        self._started: list[Pod] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(each.close() for each in self._started))

    async def start(self, name: str, role: str, *sets: str, **labels: str) -> Pod:
        """Until its ports are bound; routers find out when it is ready. `sets` are added to those of all pods."""
        number = len(self._started)
        worker = Worker(role, self._folder, [*self._sets, *sets], f"{name}.{number}")
        await worker.start()
        made = Pod(self._server, worker, name, **labels)
        self._started.append(made)
        return made
