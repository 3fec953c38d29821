"""SGLang's servers in a duel, by the Python that $DUEL_SGLANG names; before two of them smg, by $DUEL_SMG.

Flags are those that were fastest here; those of `--peer` come behind them, and the last one of a name counts.
"""

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
    *("--attention-backend", "fa3", "--moe-runner-backend", "triton"),
    *("--enable-metrics", "--enable-cache-report", "--mm-feature-transport", "cpu"),
)


def layout(roles: Sequence[str], dp: int, args: Namespace, model: Path, max_len: int) -> Layout:
    """Servers of these roles, each on `dp` GPUs, and the gateway before several of them."""
    bootstrap, port, metrics = map(str, free_ports(3))
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(dp * len(roles))))).split(",")
    over = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", bootstrap)
    parts, urls = [], []
    for number, role in enumerate(roles):
        mode = () if role == "unified" else ("--disaggregation-mode", role, *over)
        url = f"http://{HOST}:{free_ports(1)[0]}"
        command = [os.environ.get("DUEL_SGLANG", "python3"), "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", model.name, "--context-length", str(max_len), "--load-format", "dummy"]
        command += ["--host", HOST, "--port", url.rpartition(":")[2], "--dp-size", str(dp), *FLAGS, *mode, *args.peer]
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(visible[number * dp : (number + 1) * dp])}
        parts.append(Part(f"{role}-{number}", role, command, f"{url}/health", f"{url}/metrics", gpus))
        urls.append(url)
    if len(roles) > 1:
        pair = ("--pd-disaggregation", "--prefill", urls[0], bootstrap, "--decode", urls[-1])
        command = [os.environ.get("DUEL_SMG", "smg"), "launch", "--log-level", "warn"]
        command += pair if "prefill" in roles else ("--worker-urls", *urls)
        command += ["--host", HOST, "--port", port, "--prometheus-host", HOST, "--prometheus-port", metrics]
        urls.append(f"http://{HOST}:{port}")
        parts.append(Part(ROUTER, ROUTER, command, f"{urls[-1]}/readiness"))
    return Layout(parts, urls[-1], dp * len(roles), HELD, lambda run: ({}, {"cache_salt": f"run-{run}"}))


SERVERS = {
    "sglang-single": functools.partial(layout, ["unified"], 1),
    "sglang-dp": functools.partial(layout, ["unified"], 2),
    "sglang-unified": functools.partial(layout, ["unified", "unified"], 1),
    "sglang-pair": functools.partial(layout, ["prefill", "decode"], 1),
}
