"""Runs in a pod: streams completions one after the other, until the file /tmp/stop is there.

The file /tmp/first is made after the first good answer. The last line that is printed is JSON: sent, failed, reasons.
Standard library only, and no request is repeated: what a client sees as an error counts.
"""

import argparse
import json
import ssl
import sys
import threading
import urllib.request
import uuid
from pathlib import Path

REASONS = 5  # how many different ones are kept
ANSWER_S = 120.0
TLS = ssl.create_default_context()
TLS.check_hostname, TLS.verify_mode = False, ssl.CERT_NONE  # `helm test` is who looks at the certificate
# The router is within the cluster.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=TLS))


class Result:
    """Of all clients together."""

    def __init__(self) -> None:
        self.sent, self.failed, self.reasons = 0, 0, list[str]()
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """`reason`: why the request failed, empty where it did not."""
        with self._lock:
            self.sent += 1
            self.failed += bool(reason)
            if reason and reason not in self.reasons and len(self.reasons) < REASONS:
                self.reasons.append(reason)

    def text(self) -> str:
        return json.dumps({"sent": self.sent, "failed": self.failed, "reasons": self.reasons})


def request(url: str, tokens: int) -> str:
    """Why it failed, or nothing."""
    prompt = f"What is {uuid.uuid4().int % 1000} + {uuid.uuid4().int % 1000}?"
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with OPENER.open(asked, timeout=ANSWER_S) as answer:
            lines = [line.strip() for line in answer if line.strip()]
    except OSError as error:  # HTTPError, URLError and a broken connection are
        return f"{type(error).__name__}: {error}"
    if any(line.startswith(b"data:") and b'"error"' in line for line in lines):
        return "an error within the stream"
    return "" if lines and lines[-1] == b"data: [DONE]" else "a stream that did not end"


def client(url: str, tokens: int, folder: Path, result: Result) -> None:
    while not (folder / "stop").exists():
        reason = request(url, tokens)
        result.add(reason)
        if not reason:
            (folder / "first").touch()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Streams completions until FOLDER/stop is there.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    given = parser.parse_args(argv)
    result = Result()
    arguments = (given.url, given.tokens, given.folder, result)
    clients = [threading.Thread(target=client, args=arguments) for _ in range(given.clients)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    sys.stdout.write(result.text() + "\n")


if __name__ == "__main__":
    main()
