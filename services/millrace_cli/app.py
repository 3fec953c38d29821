"""The command `millrace`. Heavy packages are imported inside commands: a router needs no torch, `--help` nothing."""

import asyncio
import contextlib
import difflib
import importlib.metadata
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from millrace_cli import access, proxies
from millrace_cli.errors import CommandError, flush_output, told


class Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> object:  # Any: Typer's click is private
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # Pydantic's, which checks choices for Typer
            raise


UNUSED: Sequence[tuple[str, str, Callable[[Any], bool], str]] = (  # command, options, when nothing reads them
    ("serve-local", "prefill decode flexible", lambda given: given["unified"], "with --unified"),
    ("serve-local", "prefill decode", lambda given: given["flexible"] > 0, "with --flexible"),
    ("batch", "ca cert key", lambda given: given["address"].startswith("http://"), "with an http:// --address"),
    ("workers", "wide", lambda given: given["json"], "with --json, which has everything"),
    ("weights", "path version", lambda given: given["action"] not in ("load", "wake"), "but on load and wake"),
    ("weights", "version", lambda given: not given["path"], "without --path"),
    ("weights", "drop", lambda given: given["action"] != "pause", "but on pause"),
    ("weights", "name", lambda given: not (given["ca"] or given["cert"]), "without --tls-ca or --tls-cert"),
    ("plan", "slo", lambda given: given["asked"] is None, "without --workload"),
    ("plan", "role goal", lambda given: given["asked"] is not None, "with --workload, which compares roles"),
)
OWN_SETTINGS = {  # keys that a command sets itself
    "compile": "model",
    "check": "model",
    "plan": "model tp dp role goal",
    "serve-local": "role model engine workers grpc_port grpc http admin admin_http",
}


class Checked(typer.core.TyperCommand):
    """Nothing that is given on the command line is ignored. Variables of the environment are for all commands."""

    def invoke(self, ctx: Any) -> object:  # Any: as above
        options = {str(one.name): one.opts[-1] for one in self.params}
        given = {name for name in options if ctx.get_parameter_source(name).name == "COMMANDLINE"}
        for command, names, unused, why in UNUSED:
            if command == self.name and (idle := given.intersection(names.split())) and unused(ctx.params):
                raise CommandError(f"{options[min(idle)]}: has no effect {why}", code=2)
        own = OWN_SETTINGS.get(str(self.name), "").split()
        for name in given & {"set_", "worker_set", "router_set"}:
            for item in ctx.params[name]:
                if item.partition("=")[0] in own:
                    raise CommandError(f"{options[name]} {item}: the command sets it itself, see --help", code=2)
        return super().invoke(ctx)


app = typer.Typer(
    name="millrace", cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"millrace {importlib.metadata.version('millrace')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Disaggregated prefill/decode serving of DeepSeek-V3-architecture models."""


Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")]


@app.command("serve-local", cls=Checked)
def serve_local(
    prefill: Annotated[int, typer.Option(min=1, max=256, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=256, help="Decode workers.")] = 1,
    unified: Annotated[bool, typer.Option("--unified", help="One worker for both phases instead.")] = False,
    flexible: Annotated[int, typer.Option(min=0, max=256, help="Workers whose phases follow the load instead.")] = 0,
    engine: Annotated[Literal["model", "sim"], typer.Option(help="sim: a timing model without weights.")] = "model",
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder. Default: models/tiny.")] = None,
    grpc_port: Port = 50051,
    http_port: Port = 8000,
    admin_port: Port = 50052,
    admin_http_port: Port = 8001,
    worker_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Worker setting.")] = None,
    router_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Router setting.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder of the log files. Default: a new temporary one.")] = None,
) -> None:
    """Run a router and its workers on this machine until Ctrl-C."""
    from millrace_cli import serve_local as command
    from millrace_cli.cluster import TINY, ClusterSpec

    apart = not (unified or flexible)
    spec = ClusterSpec(
        prefill=prefill * apart,
        decode=decode * apart,
        unified=int(unified),
        flexible=flexible,
        engine=engine,
        model=model or TINY,
        ports={"grpc": grpc_port, "http": http_port, "admin": admin_port, "admin_http": admin_http_port},
        worker_set=tuple(worker_set or ()),
        router_set=tuple(router_set or ()),
        log_dir=log_dir,
        restart=True,
    )
    command.check(spec)
    command.serve_local(spec)


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run_module(module: str, *arguments: str) -> None:
    """The same as `python -m MODULE ARGUMENTS`: a server or bench has one command line, wherever it is started."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_bench(command: str, module: str, arguments: Sequence[str]) -> None:
    """CommandError: wheels and images have the load client alone."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise CommandError(f"`millrace {command}` needs the source tree; only `millrace bench serving` is installed")
    run_module(module, *arguments)


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
    "flexible": "a worker whose phases follow the load",
}.items():
    app.command(role, context_settings=PASS_ON, help=f"Run {what}.")(server(role))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt; - reads it from standard input.")],
    address: Annotated[str, access.address("The router's gRPC address.")] = "127.0.0.1:50051",
    max_tokens: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Most output tokens.")] = 128,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0: greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed, for equal answers.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a chat message or as it is.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line at the end instead.")] = False,
    api_key: access.ApiKey = "",
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
) -> None:
    """Stream the answer to one prompt."""
    from millrace_cli import generate as command

    with told(UnicodeError, of="the prompt is not valid UTF-8"):
        text = sys.stdin.read() if prompt == "-" else prompt
        request = command.request_of(text, chat, max_tokens, temperature, seed)
    asyncio.run(command.generate(address, request, json, access.identity(ca, cert, key), api_key))


@app.command(cls=Checked)
def batch(
    file: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, one JSON object per line.")],
    out: Annotated[Path, typer.Option(help="File of answers. Answered requests are not sent again.")],
    address: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
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


@app.command(cls=Checked)
def workers(
    address: Annotated[str, access.address("The router's admin address, of gRPC.")] = "127.0.0.1:50052",
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per worker and line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
    secret: access.Secret = None,
) -> None:
    """Show the workers of a router. Example: millrace workers --watch"""
    from millrace_cli import workers as command

    asyncio.run(command.show(address, wide, json, watch, access.identity(ca, cert, key), access.token(secret)))


keys = typer.Typer(help="Make API keys for a router's clients.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.callback()
def _keys() -> None:
    """Without it Typer would take the one command for the group."""


@keys.command("new")
def new_key(tenant: Annotated[str, typer.Option(metavar="NAME", help="Tenant of the key.")] = "default") -> None:
    """Print a random key, and its entry for the router's key file, which has only its hash."""
    from millrace_router.http import api_keys

    if not re.fullmatch(api_keys.NAME, tenant):
        raise CommandError(f"--tenant: {tenant!r} does not match {api_keys.NAME}", code=2)
    key, sha256 = api_keys.new_key()
    print(f'key: {key}\nentry: {{name: "{tenant}", sha256: "{sha256}"}}')


@app.command(cls=Checked)
def weights(
    addresses: access.Addresses,
    action: Annotated[Literal["pause", "load", "resume", "sleep", "wake"], typer.Argument()],
    path: Annotated[str, typer.Option(help="load, wake: the checkpoint's folder, where the workers run.")] = "",
    version: Annotated[str, typer.Option(help="Name of the weights. Default: the folder's name.")] = "",
    drop: Annotated[
        bool, typer.Option("--drop", help="pause: end running requests; routers retry them elsewhere.")
    ] = False,
    ca: access.Ca = None,
    cert: access.Cert = None,
    key: access.Key = None,
    name: access.Name = "",
    secret: access.Secret = None,
) -> None:
    """Pause workers, load other weights into them, resume; sleep and wake."""
    from millrace.v1 import worker_pb2

    from millrace_cli.weights import act

    chosen = worker_pb2.WeightsAction.Value(f"WEIGHTS_ACTION_{action.upper()}")
    order = worker_pb2.SetWeightsRequest(action=chosen, path=path, version=version, drop=drop)
    asyncio.run(act(addresses, order, access.identity(ca, cert, key, name), access.token(secret)))


BENCHES = {
    "serving": "load a whole system: TTFT, TPOT, throughput, goodput",
    "pd": "prefill and decode apart, against unified workers",
    "duel": "whole servers, ours and a peer's, before the same requests and faults",
    "router": "load routers whose workers cost nothing",
    "policy": "time routing decisions",
    "transfer": "read KV pages between two processes",
    "handover": "time what handing a prompt over costs",
    "tiers": "read pages from the host's memory and from a folder",
    "startup": "time a start from nothing to READY, cold and warm",
    "engine": "time the engine's steps, with a model or without",
    "shard": "time one rank of the 671B model on one GPU",
    "ranks": "time ranks of the 671B model that compute together",
    "replicas": "time replicas of the 671B model that step together",
    "allreduce": "time sums over tensor-parallel ranks",
    "exchange": "time rows to the experts of other ranks and back",
    "balance": "measure how evenly experts are loaded",
    "kernels": "time every operation beside its libraries and its bound",
    "gpu": "run all checks and measurements of one GPU, in stages",
    "node": "run all checks and measurements of several GPUs, in stages",
}


@app.command("compile", cls=Checked)
def compile_caches(
    model: Annotated[Path, typer.Option(help="Checkpoint folder; with --random-weights, of a config.json alone.")],
    config: Annotated[Path | None, typer.Option(help="The workers' YAML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Worker setting.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Read no weights.")] = False,
) -> None:
    """Fill the compile caches: start the ranks of a worker once, without serving."""
    from millrace_cli.compile import fill

    asyncio.run(fill(config, (*(set_ or ()), f"model={model}"), os.environ, random_weights=random_weights))


@app.command("check", cls=Checked)
def check_model(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    gpu: Annotated[str, typer.Option(help="GPU model for the values file.")] = "H200",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Worker setting.")] = None,
) -> None:
    """Show whether a checkpoint can be served and on which GPUs; print a values file for Helm."""
    from millrace_cli.check import check

    check(model, gpu, set_ or ())


@app.command("plan", cls=Checked)
def plan_worker(
    model: Annotated[Path, typer.Option(help="Checkpoint folder; its config.json is enough.")],
    gpu: Annotated[str, typer.Option(help="GPU model, as for check.")] = "H200",
    gpus: Annotated[int, typer.Option(min=1, max=512, help="GPUs of the worker.")] = 8,
    tp: Annotated[int | None, typer.Option(min=1, help="Default: by goal.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Default: by goal.")] = None,
    role: Annotated[Literal["prefill", "decode", "unified", "flexible"], typer.Option(help="Worker role.")] = "unified",
    goal: Annotated[Literal["throughput", "latency", "balanced"], typer.Option(help="What auto favours.")] = "balanced",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Worker setting.")] = None,
    asked: Annotated[
        str | None, typer.Option("--workload", metavar="INPUT/OUTPUT@RATE", help="Print the best split for this load.")
    ] = None,
    slo: Annotated[str, typer.Option(help="With --workload: SLOs in seconds.")] = "ttft=1,tpot=0.04",
) -> None:
    """Show what a worker would choose on any GPUs, what fits, and how long its steps take."""
    from millrace_serve.engine.config import Role
    from millrace_serve.plan.settings import Goal

    from millrace_cli.plan import plan, split, workload

    if asked is not None:
        workload(model, gpu, gpus, (tp, dp), asked, slo, set_ or ())
        return
    plan(model, gpu, split(gpus, Goal(goal), tp, dp), Role(role), Goal(goal), set_ or ())


@app.command(context_settings=PASS_ON)
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHES)}.")] = ""
) -> None:
    """Measure one part, or the whole system. Example: millrace bench serving --num-requests 20"""
    if name in ("", "--help", "-h"):
        print("Usage: millrace bench NAME [OPTIONS]; `millrace bench NAME --help` has the options.\n")
        print("\n".join(f"  {one:<15} {what}" for one, what in BENCHES.items()))
        sys.exit(0 if name else 2)
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(BENCHES)}"
        raise CommandError(f"there is no bench {name!r}; {advice}", code=2)
    package = "millrace_load" if name == "serving" else "millrace_bench"
    run_bench(f"bench {name}", f"{package}.{name}", context.args)


@app.command("eval", context_settings=PASS_ON)
def evaluate(context: typer.Context) -> None:
    """Measure accuracy on the task suite, of a running system or of a checkpoint."""
    run_bench("eval", "millrace_bench.eval", context.args)


def main() -> None:
    proxies.spare_loopback()
    try:
        with told(OSError, code=1), contextlib.ExitStack() as end:  # of a standard output that has no buffer
            end.callback(flush_output)
            app()
    except CommandError as error:
        print(f"millrace: {error}", file=sys.stderr)
        sys.exit(error.code)
