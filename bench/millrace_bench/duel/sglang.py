"""SGLang's servers in a duel, by the Python that $DUEL_SGLANG names, and its gateway, by $DUEL_SMG.

    sglang-single   one server on one GPU
    sglang-dp       one server with dp = 2
    sglang-unified  two servers behind smg
    sglang-pair     a prefill and a decode server behind smg, KV over NIXL

Flags are those that were fastest here; those of `--peer` come behind them, and the last one of a name counts. 0.5.17
has no checksum of transferred KV that could be turned on.
"""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from millrace_cli.cluster import HOST

from millrace_bench.duel.parts import ROUTER, Layout, Part
from millrace_bench.peers.sides import free_ports

HELD = r"^sglang:kv_used_tokens(?:\{[^}]*\})? (\S+)$"
FLAGS = (
    *("--attention-backend", "fa3", "--moe-runner-backend", "triton", "--grammar-backend", "llguidance"),
    *("--enable-metrics", "--enable-cache-report", "--mm-feature-transport", "cpu"),
)


def single(gpus: int, args: Namespace, model: Path, max_len: int) -> Layout:
    server, url = _server("unified", range(gpus), ("--dp-size", str(gpus), *args.peer), model, max_len)
    return _layout([server], url, gpus)


def behind_smg(roles: Sequence[str], args: Namespace, model: Path, max_len: int) -> Layout:
    """Two servers of these roles, each on a GPU."""
    bootstrap, port, metrics = free_ports(3)
    over = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(bootstrap))
    modes = {"unified": (), **{role: ("--disaggregation-mode", role, *over) for role in ("prefill", "decode")}}
    servers = [_server(role, [gpu], (*modes[role], *args.peer), model, max_len) for gpu, role in enumerate(roles)]
    urls = [url for _, url in servers]
    workers = ["--worker-urls", *urls]
    if "prefill" in roles:
        workers = ["--pd-disaggregation", "--prefill", urls[0], str(bootstrap), "--decode", urls[1]]
    listen = ("--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics))
    command = [os.environ.get("DUEL_SMG", "smg"), "launch", *workers, *listen, "--log-level", "warn"]
    url = f"http://{HOST}:{port}"
    return _layout([*(part for part, _ in servers), Part(ROUTER, ROUTER, command, f"{url}/readiness")], url, len(roles))


def _layout(parts: Sequence[Part], url: str, gpus: int) -> Layout:
    return Layout(parts, url, gpus, HELD, lambda run: ({}, {"cache_salt": f"run-{run}"}))


def _server(role: str, gpus: Sequence[int], more: Sequence[str], model: Path, max_len: int) -> tuple[Part, str]:
    """The part and its URL."""
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    command = [os.environ.get("DUEL_SGLANG", "python3"), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--served-model-name", model.name, "--context-length", str(max_len), "--load-format", "dummy"]
    command += ["--host", HOST, "--port", str(port), *FLAGS, *more]
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return Part(f"{role}-{gpus[0]}", role, command, f"{url}/health", f"{url}/metrics", shown), url


SERVERS = {
    "sglang-single": functools.partial(single, 1),
    "sglang-dp": functools.partial(single, 2),
    "sglang-unified": functools.partial(behind_smg, ("unified", "unified")),
    "sglang-pair": functools.partial(behind_smg, ("prefill", "decode")),
}
