"""What is evaluated: a running address, a checkpoint in this process, or a system that is started for the run.

127.0.0.1:50051            gRPC                       http://127.0.0.1:8000     OpenAI-compatible HTTP
models/tiny                our engine, in process     transformers:models/tiny  the reference
pair:models/tiny           router, prefill, decode    unified:models/tiny       router, one unified worker
"""

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import httpx
from millrace_cli import probe, proxies
from millrace_cli.cluster import ClusterSpec, LocalCluster, StartError
from millrace_cli.errors import CommandError

from millrace_bench.eval.backend import Backend
from millrace_bench.eval.remote import GrpcBackend, HttpBackend


class Kind(StrEnum):
    GRPC = "grpc"
    HTTP = "http"
    MODEL = "model"
    TRANSFORMERS = "transformers"
    PAIR = "pair"
    UNIFIED = "unified"


FOLDERS = (Kind.MODEL, Kind.TRANSFORMERS, Kind.PAIR, Kind.UNIFIED)  # kinds that name a checkpoint


@dataclass(frozen=True, slots=True)
class System:
    kind: Kind
    where: str  # address, URL or checkpoint folder
    device: str = "cpu"  # of MODEL and TRANSFORMERS
    worker_set: tuple[str, ...] = ()  # of MODEL, PAIR and UNIFIED: `--set` items of every worker
    keep_quantised: bool | None = None  # of MODEL: whether products run on quantised weights; None: where kernels can
    form: str = ""  # of MODEL: absorbed or expanded, for cached prefixes of prompt chunks; empty: by measurement
    kernels: tuple[tuple[str, str], ...] = ()  # of MODEL: ops and their implementations, in the place of the table's

    def __post_init__(self) -> None:
        if self.kind in FOLDERS and not (Path(self.where) / "config.json").is_file():
            raise CommandError(f"{self.where}: not a checkpoint folder, there is no config.json", code=2)
        if self.kind is Kind.GRPC and not re.fullmatch(r".+:\d{1,5}", self.where):
            raise CommandError(f"{self.where}: not of the form HOST:PORT", code=2)
        if self.kind is Kind.HTTP and not re.match(r"https?://.", self.where):
            raise CommandError(f"{self.where}: not a URL", code=2)

    @classmethod
    def parse(cls, text: str, device: str = "cpu") -> "System":
        """One of the forms above. CommandError for none of them."""
        head, _, rest = text.partition(":")
        if head in (Kind.TRANSFORMERS, Kind.PAIR, Kind.UNIFIED):
            return cls(Kind(head), rest, device)
        if text.startswith(("http://", "https://")):
            return cls(Kind.HTTP, text)
        return cls(Kind.MODEL, text, device) if Path(text).is_dir() else cls(Kind.GRPC, text)

    def __str__(self) -> str:
        named = self.where if self.kind in (Kind.GRPC, Kind.HTTP) else f"{self.kind}:{self.where}"
        return " ".join((named, *self.worker_set))

    @contextlib.asynccontextmanager
    async def open(self, concurrency: int) -> AsyncIterator[Backend]:
        """The backend, for as long as the context lives. CommandError when there is none to be had."""
        opening = {
            Kind.GRPC: self._grpc,
            Kind.HTTP: self._http,
            Kind.MODEL: self._engine,
            Kind.TRANSFORMERS: self._transformers,
            Kind.PAIR: self._cluster,
            Kind.UNIFIED: self._cluster,
        }
        async with opening[self.kind](concurrency) as backend:
            yield backend

    @contextlib.asynccontextmanager
    async def _grpc(self, concurrency: int) -> AsyncIterator[Backend]:
        if not await probe.is_serving(self.where):
            raise CommandError(
                f"no server answers at {self.where}; start one with `millrace serve-local`{proxies.hint()}"
            )
        yield GrpcBackend(self.where, concurrency)

    @contextlib.asynccontextmanager
    async def _http(self, concurrency: int) -> AsyncIterator[Backend]:
        async with httpx.AsyncClient(base_url=self.where, limits=httpx.Limits(max_connections=None)) as client:
            yield HttpBackend(client, concurrency)

    @contextlib.asynccontextmanager
    async def _engine(self, concurrency: int) -> AsyncIterator[Backend]:
        from millrace_kernels.backend import forced

        from millrace_bench.eval.in_process import EngineBackend

        with forced(**dict(self.kernels)):
            how = self.worker_set, self.keep_quantised, self.form
            try:
                backend = EngineBackend(Path(self.where), self.device, concurrency, *how)
            except (ValueError, OSError) as error:
                raise CommandError(str(error)) from error
            with contextlib.closing(backend):
                yield backend

    @contextlib.asynccontextmanager
    async def _transformers(self, concurrency: int) -> AsyncIterator[Backend]:
        from millrace_bench.eval.in_process import TransformersBackend

        try:
            yield TransformersBackend(Path(self.where), self.device)
        except (ValueError, OSError) as error:
            raise CommandError(f"transformers: {error}") from error

    @contextlib.asynccontextmanager
    async def _cluster(self, concurrency: int) -> AsyncIterator[Backend]:
        pair = int(self.kind is Kind.PAIR)
        spec = ClusterSpec(
            prefill=pair, decode=pair, unified=1 - pair, model=Path(self.where), worker_set=self.worker_set
        )
        try:
            async with LocalCluster(spec) as cluster:
                yield GrpcBackend(cluster.grpc_address, concurrency)
        except StartError as error:
            raise CommandError(str(error)) from error
