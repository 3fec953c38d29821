"""The command `millrace`. Heavy packages are imported inside commands: a router needs no torch, `--help` nothing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from millrace_cli import access, proxies
from millrace_cli.errors import CommandError


class Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # Pydantic's, which checks choices for Typer
            raise


app = typer.Typer(
    name="millrace",
    cls=Commands,
    help="Disaggregated prefill/decode serving of DeepSeek-V3-architecture models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")]


@app.command("serve-local")
def serve_local(
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    unified: Annotated[bool, typer.Option("--unified", help="One worker for both phases instead.")] = False,
    engine: Annotated[Literal["model", "sim"], typer.Option(help="sim: a timing model without weights.")] = "model",
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder. Default: models/tiny.")] = None,
    grpc_port: Port = 50051,
    http_port: Port = 8000,
    admin_port: Port = 50052,
    admin_http_port: Port = 8001,
    worker_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For every worker.")] = None,
    router_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For the router.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder of the log files. Default: a new temporary one.")] = None,
) -> None:
    """Run a router and its workers on this machine until Ctrl-C."""
    from millrace_cli.cluster import TINY, ClusterSpec
    from millrace_cli.serve_local import serve_local as run

    spec = ClusterSpec(
        prefill=0 if unified else prefill,
        decode=0 if unified else decode,
        unified=int(unified),
        engine=engine,
        model=model or TINY,
        ports={"grpc": grpc_port, "http": http_port, "admin": admin_port, "admin_http": admin_http_port},
        worker_set=tuple(worker_set or ()),
        router_set=tuple(router_set or ()),
        log_dir=log_dir,
        restart=True,
    )
    run(spec)


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run_module(module: str, *arguments: str) -> None:
    """The same as `python -m MODULE ARGUMENTS`: a server or bench has one command line, wherever it is started."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def server(role: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        from millrace_cli.cluster import SERVERS

        run_module(*SERVERS[role], *context.args)

    return run


for role, what in {
    "router": "a router",
    "prefill": "a prefill worker",
    "decode": "a decode worker",
    "unified": "a worker for both phases",
}.items():
    app.command(role, context_settings=PASS_ON, help=f"Run {what}.")(server(role))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Annotated[str, typer.Option(help="The router's gRPC address.")] = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1)] = 128,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Makes sampling reproducible.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a chat message, or as it is.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line at the end instead.")] = False,
    api_key: access.ApiKey = "",
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
) -> None:
    """Stream the answer to one prompt."""
    from millrace_cli import generate as command

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        request = command.request_of(text, chat, max_tokens, temperature, seed)
    except UnicodeError as error:
        raise CommandError(f"the prompt is not valid UTF-8: {error}", code=2) from error
    asyncio.run(command.generate(address, request, json, access.identity(ca, cert, key), api_key))


@app.command()
def batch(
    file: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, one JSON object per line.")],
    out: Annotated[Path, typer.Option(help="The answers. What has one there is not sent again.")],
    address: Annotated[str, typer.Option(help="URL of any server with these APIs.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at a time.")] = 64,
    api_key: access.ApiKey = "",
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
) -> None:
    """Answer a file of requests; run it again after an interruption."""
    from millrace_cli import batch as command

    client = command.client_of(address, api_key, concurrency, access.ssl_context(ca, cert, key))
    sys.exit(asyncio.run(command.run(client, file, out, concurrency)))


@app.command()
def workers(
    address: Annotated[str, typer.Option(help="The router's admin address.")] = "127.0.0.1:50052",
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
) -> None:
    """Show the workers of a router."""
    from millrace_cli.workers import show

    asyncio.run(show(address, access.identity(ca, cert, key)))


@app.command()
def weights(
    addresses: Annotated[list[str], typer.Argument(metavar="ADDRESS", help="The workers' gRPC addresses.")],
    action: Annotated[Literal["pause", "load", "resume", "sleep", "wake"], typer.Argument()],
    path: Annotated[str, typer.Option(help="load, wake: the checkpoint's folder, where the workers run.")] = "",
    version: Annotated[str, typer.Option(help="Name of these weights. Default: the folder's name.")] = "",
    drop: Annotated[
        bool, typer.Option("--drop", help="pause: end running requests; routers try them elsewhere.")
    ] = False,
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
) -> None:
    """Pause workers, load other weights into them, resume; sleep and wake."""
    from millrace.v1 import worker_pb2

    from millrace_cli.weights import act

    chosen = worker_pb2.WeightsAction.Value(f"WEIGHTS_ACTION_{action.upper()}")
    order = worker_pb2.SetWeightsRequest(action=chosen, path=path, version=version, drop=drop)
    asyncio.run(act(addresses, order, access.identity(ca, cert, key)))


BENCHES = (
    *("serving", "pd", "router", "policy", "transfer", "handover", "tiers", "startup"),
    *("engine", "shard", "ranks", "replicas", "shared_prompts", "allreduce", "exchange", "balance", "kernels"),
    *("gpu", "node"),
)


@app.command("compile")
def compile_caches(
    model: Annotated[Path, typer.Option(help="Checkpoint folder; with --random-weights, of a config.json alone.")],
    config: Annotated[Path | None, typer.Option(help="The workers' YAML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As for a worker.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Read no weights.")] = False,
) -> None:
    """Fill the compile caches: start the ranks of a worker once, without serving."""
    from millrace_cli.compile import fill

    overrides = (*(set_ or ()), f"model={model}", *(("random_weights=true",) if random_weights else ()))
    asyncio.run(fill(config, overrides, os.environ))


@app.command("check")
def check_model(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    gpu: Annotated[Literal["H20", "H100", "H200"], typer.Option(help="For the values file.")] = "H200",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As for a worker.")] = None,
) -> None:
    """Say in seconds whether a checkpoint can be served and on which GPUs; print a values file for Helm."""
    from millrace_cli.check import check

    check(model, gpu, set_ or ())


@app.command(context_settings=PASS_ON)
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHES)}.")] = ""
) -> None:
    """Measure one part, or the whole system."""
    if name in ("--help", "-h"):
        print(f"millrace bench NAME [OPTIONS], and --help behind a name. Names: {', '.join(BENCHES)}")
        return
    if name not in BENCHES:
        raise CommandError(f"there is no bench {name!r}; choose one of {', '.join(BENCHES)}", code=2)
    run_module(f"millrace_bench.{name}", *context.args)


@app.command("eval", context_settings=PASS_ON)
def evaluate(context: typer.Context) -> None:
    """Measure accuracy on the task suite, of a running system or of a checkpoint."""
    run_module("millrace_bench.eval", *context.args)


@app.command()
def version() -> None:
    """Show the version."""
    print(importlib.metadata.version("millrace"))


def main() -> None:
    proxies.spare_loopback()
    try:
        app()
    except CommandError as error:
        print(f"millrace: {error}", file=sys.stderr)
        sys.exit(error.code)
