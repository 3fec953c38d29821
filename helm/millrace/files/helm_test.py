"""`helm test`: a request goes through the router, and its KV pages from a prefill to a decode worker.

1. the router answers /ready
2. count the KV bytes that all decode workers have read
3. a prompt that nobody has seen: an answer with tokens
4. count again, until there are more: without them it was never disaggregated. --no-transfer: nothing is counted where
   one worker may compute prompt and answer

Standard library only. The key in MILLRACE_API_KEY is sent; --ca, --served, --cert and --tls-key are PEM files.
"""

import argparse
import json
import os
import signal
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable

METRIC = "millrace_kv_bytes_total"
PAUSE_S = 0.5
CALL_S = 30.0
Ask = Callable[[str, bytes | None], str]


def asker(context: ssl.SSLContext | None, key: str) -> Ask:
    """The body of an answer; OSError for everything that is not 200."""
    no_proxy, tls = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    opener = urllib.request.build_opener(no_proxy, tls)  # all of it is within the cluster
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(url: str, body: bytes | None) -> str:
        request = urllib.request.Request(url, body, headers)
        try:
            with opener.open(request, timeout=CALL_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise OSError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error

    return ask


def kv_bytes(ask: Ask, workers: list[str]) -> float:
    """Read so far by every address behind these names (host:port)."""
    total = 0.0
    for name in workers:
        host, _, port = name.rpartition(":")
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
        for address in sorted(map(str, addresses)):
            shown = f"[{address}]" if ":" in address else address
            lines = ask(f"http://{shown}:{port}/metrics", None).splitlines()
            total += sum(float(line.split()[1]) for line in lines if line.startswith(METRIC + " "))
    return total


def until(condition: Callable[[], bool], deadline: float, what: str) -> None:
    last = "not true"
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except OSError as error:
            last = str(error)
        time.sleep(PAUSE_S)
    raise TimeoutError(f"{what}: {last}")


def check(options: argparse.Namespace, ask: Ask) -> str:
    """What was seen. OSError (TimeoutError is one) when it is not what it should be."""
    deadline = time.monotonic() + options.timeout
    until(lambda: bool(ask(f"{options.router}/ready", None)), deadline, "the router is not ready")
    before = 0.0 if options.no_transfer else kv_bytes(ask, options.decode)
    prompt = " ".join(str(uuid.uuid4()) for _ in range(8))
    body = {"model": options.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = json.loads(ask(f"{options.router}/v1/completions", json.dumps(body).encode()))
    tokens = int(answer["usage"]["completion_tokens"])
    if tokens < 1:
        raise OSError(f"the answer has no tokens: {answer}")
    if options.no_transfer:
        return f"{tokens} tokens"
    until(lambda: kv_bytes(ask, options.decode) > before, deadline, "no decode worker has read any KV page")
    return f"{tokens} tokens, {kv_bytes(ask, options.decode) - before:.0f} bytes of KV read"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, help="http://host:port")
    parser.add_argument("--decode", action="append", default=[], help="host:port of metrics; repeatable")
    parser.add_argument("--model", required=True)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--no-transfer", action="store_true")
    parser.add_argument("--ca")
    parser.add_argument("--served", help="the router's own certificate: whatever its names and its authority are")
    parser.add_argument("--cert")
    parser.add_argument("--tls-key")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    trusted = options.ca or options.served
    context = ssl.create_default_context(cafile=trusted) if trusted else None
    if context and options.served:
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if context and options.cert:
        context.load_cert_chain(options.cert, options.tls_key)
    try:
        print(f"ok: {check(options, asker(context, os.environ.get('MILLRACE_API_KEY', '')))}")  # noqa: T201
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # without one PID 1 never gets it
    sys.exit(main(sys.argv[1:]))
