"""A group of pods as LeaderWorkerSet starts it, on one machine: what the chart renders for a leader and a follower runs
in namespaces of network, mounts, processes and host name, with what kubelet, DNS and LeaderWorkerSet add to it.

async with Group(folder, "workers.group.config.engine=sim") as group:
    group.publish(); await group.ready(60); await group.leader.delete()

A pod's root file system is this machine's, writable, and its user is ours: those two things are not tested here.
"""

import asyncio
import base64
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace_chart.render import NAMESPACE, Object, find_helm, objects, template

from millrace_testing import namespaces
from millrace_testing.charts import files_of, of_kind
from millrace_testing.paths import ROOT, TINY
from millrace_testing.procs import PYTHONPATH

SETS = tuple(f"workers.group.{item}" for item in ("role=unified", "kind=lws", "size=2", "dp=2", "gpus=0"))
MOUNTS = """
set -e
pod=$1 name=$2
shift 2
echo "$name" >/proc/sys/kernel/hostname
mount -t tmpfs tmpfs /run
mkdir /run/millrace /run/upper /run/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work overlay /etc
echo "hosts: files" >/etc/nsswitch.conf
mkdir -p /etc/millrace
cp -r "$pod/config" "$pod/secret" /etc/millrace/
mount --bind "$pod/hosts" /etc/hosts
mount -t tmpfs -o size=1G tmpfs /dev/shm
mount -t tmpfs tmpfs /var/cache
mkdir /var/cache/millrace
mount --bind "$pod/tmp" /tmp
exec "$@"
"""


def missing() -> str:
    """What this machine lacks for a group; empty: nothing."""
    for tool in ("unshare", "nsenter", "ss"):
        if shutil.which(tool) is None:
            return f"no {tool} here (packages util-linux and iproute2)"
    if not (Path(sys.executable).parent / "ray").exists():
        return "Ray is not installed here"
    if find_helm() is None:
        return "no helm here: `make setup` could not install it (npm)"
    if Path("/tmp") in ROOT.parents:
        return "the source tree is in /tmp, and a pod has a /tmp of its own"
    if not namespaces.available():
        return "this machine makes no network namespaces"
    return ""


class Pod:
    """One pod's container. `publish` others to it before it can find them by name."""

    def __init__(self, name: str, folder: Path, container: Object, variables: dict[str, str], enter: list[str]) -> None:
        """`variables`: what others than the container's own list set, and what its fields and secrets refer to."""
        self.name = name
        self.ip = variables["status.podIP"]
        self.log = folder / f"{name}.log"
        self._container, self._enter, self._folder = container, enter, folder / name
        self._env = environment(container, variables)
        self._process: asyncio.subprocess.Process | None = None
        for volume in ("config", "secret"):
            shutil.copytree(folder / volume, self._folder / volume)
        (self._folder / "tmp").mkdir()  # with Ray's logs
        self.publish({})

    def publish(self, names: dict[str, str]) -> None:
        """From now on the pod finds these names, and its own; address by name."""
        known = {"localhost": "127.0.0.1", self.name: self.ip, **names}
        (self._folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))

    async def start(self) -> None:
        own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        mounts = ["sh", "-c", MOUNTS, "sh", str(self._folder), self.name]
        command = [expand(word, self._env) for word in (*self._container["command"], *self._container["args"])]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._enter, *own, *mounts, *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )

    async def ended(self, timeout_s: float) -> int:
        """Its exit code."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def delete(self, grace_s: float = 60.0) -> int:
        """As kubelet does: preStop, SIGTERM, and SIGKILL after `grace_s`. Its exit code."""
        hook = await self.run(*self._container["lifecycle"]["preStop"]["exec"]["command"])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hook.wait(), grace_s)
        self.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            return await self.ended(grace_s)
        self.send(signal.SIGKILL)
        return await self.ended(10.0)

    async def run(self, *command: str) -> asyncio.subprocess.Process:
        """Another process in the pod, with the container's environment."""
        enter = ["nsenter", "--target", str(self._first.pid), "--mount", "--uts", "--net", "--pid"]
        return await asyncio.create_subprocess_exec(*enter, *command, env=self._env, stdout=subprocess.PIPE)

    def send(self, number: signal.Signals) -> None:
        """To process 1 of the pod."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            self._first.send_signal(number)

    def processes(self, name: str) -> list[psutil.Process]:
        return [process for process in self._first.children(recursive=True) if process.name() == name]

    def says(self, text: str) -> bool:
        return self.log.exists() and re.search(text, self.log.read_text(errors="replace")) is not None

    @property
    def variables(self) -> dict[str, str]:
        return self._env

    @property
    def _first(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid).children()[0]


class Group:
    """A leader and a follower of a rendered LeaderWorkerSet with the values `SETS` and `sets`."""

    def __init__(self, folder: Path, *sets: str) -> None:
        self._folder = folder
        items = objects(template((), (*SETS, f"model.path={TINY}", *sets)))
        (group,) = of_kind(items, "LeaderWorkerSet")
        name = group["metadata"]["name"]
        self._config = files_of(items, name)
        self._secrets = {
            f"{item['metadata']['name']}/{key}": base64.b64decode(text).decode()
            for item in of_kind(items, "Secret")
            for key, text in item["data"].items()
        }
        (self.secret,) = (text for name, text in self._secrets.items() if name.endswith("-millrace-secret/key"))
        self._template = group["spec"]["leaderWorkerTemplate"]
        self.leader_name = f"{name}-0.{name}.{NAMESPACE}"
        self._names = (f"{name}-0", f"{name}-0-1")
        self._spaces = namespaces.Namespaces(self._names)

    async def __aenter__(self) -> Self:
        (self._folder / "config").mkdir()
        (self._folder / "secret").mkdir()
        (self._folder / "secret" / "key").write_text(self.secret)
        for file, text in self._config.items():
            (self._folder / "config" / file).write_text(text)
        self._spaces.__enter__()
        self.leader, self.follower = (self._pod(index) for index in (0, 1))
        try:
            await asyncio.gather(self.leader.start(), self.follower.start())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in (self.leader, self.follower):
            if pod.running:
                pod.send(signal.SIGKILL)
                await pod.ended(10.0)
        self._spaces.__exit__()

    def publish(self) -> None:
        """The leader's name is in DNS, though it is not ready: as the Service says that LeaderWorkerSet makes."""
        self.follower.publish({self.leader_name: self.leader.ip})

    def withdraw(self) -> None:
        """The leader's name is gone: it terminates."""
        self.follower.publish({})

    def cut(self) -> None:
        """The follower loses its network: packets are lost, and no connection is closed."""
        self._spaces.cut(self._names[1])

    async def ready(self, timeout_s: float) -> float:
        """Until the leader's readiness probe succeeds; seconds."""
        begin = time.monotonic()
        while not await self.is_ready():
            assert self.leader.running and self.follower.running, f"a pod ended:\n{self.logs()}"
            assert time.monotonic() - begin < timeout_s, f"not ready after {timeout_s} s:\n{self.logs()}"
            await asyncio.sleep(0.2)
        return time.monotonic() - begin

    async def is_ready(self) -> bool:
        (container,) = self._template["leaderTemplate"]["spec"]["containers"]
        async with grpc.aio.insecure_channel(f"{self.leader.ip}:{container['readinessProbe']['grpc']['port']}") as ch:
            try:
                answer = await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest(), timeout=3)
            except grpc.aio.AioRpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def until(self, pod: Pod, text: str, timeout_s: float) -> None:
        """Until the pod has printed a line with this pattern."""
        deadline = time.monotonic() + timeout_s
        while not pod.says(text):
            assert time.monotonic() < deadline, f"{pod.name} never said {text!r}:\n{self.logs()}"
            await asyncio.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(
            f"--- {pod.name}\n{pod.log.read_text(errors='replace')}" for pod in (self.leader, self.follower)
        )

    def _pod(self, index: int) -> Pod:
        name = self._names[index]
        (container,) = self._template["workerTemplate" if index else "leaderTemplate"]["spec"]["containers"]
        variables = {
            "LWS_LEADER_ADDRESS": self.leader_name,
            "LWS_WORKER_INDEX": str(index),
            "LWS_GROUP_SIZE": "2",
            "metadata.name": name,
            "status.podIP": self._spaces.host(name),
            **self._secrets,
        }
        return Pod(name, self._folder, container, variables, self._spaces.enter(name))


def environment(container: Object, variables: dict[str, str]) -> dict[str, str]:
    """Of a container whose image has our virtual environment: as kubelet makes it, in the order of the list."""
    env = {name: text for name, text in variables.items() if name.isupper()}
    for item in container["env"]:
        source = item.get("valueFrom", {})
        if "fieldRef" in source:
            env[item["name"]] = variables[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            env[item["name"]] = variables["{name}/{key}".format(**source["secretKeyRef"])]
        else:
            env[item["name"]] = expand(item["value"], env)
    image = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return {**image, "PYTHONPATH": PYTHONPATH, **env}


def expand(text: str, env: dict[str, str]) -> str:
    """$(NAME), as in Kubernetes."""
    return re.sub(r"\$\(([A-Z_]+)\)", lambda found: env.get(found[1], found[0]), text)
