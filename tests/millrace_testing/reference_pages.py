"""The command `make reference`: writes the tables of docs/reference that the code knows.

A table stands between `<!-- reference: errors -->` and `<!-- end of reference -->`.
Settings come from the configuration models and the comments beside their fields, metrics from the catalogue, statuses
from the table of errors. tests/test_reference.py fails while a page and the code differ.
"""

import ast
import enum
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from millrace_common import metrics
from millrace_common.config import LONGEST_S
from millrace_common.reasons import Reason
from millrace_router.config import RouterConfig
from millrace_rpc.errors import TABLE
from millrace_serve.worker.config import WorkerConfig
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace_testing.paths import ROOT

PAGES = ROOT / "docs" / "reference"
BLOCK = re.compile(r"(<!-- reference: ([a-z-]+) -->\n)(.*?)(<!-- end of reference -->)", re.DOTALL)
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

# Cause, and what a client or an operator does about it.
ACTIONS: Mapping[Reason, tuple[str, str]] = {
    Reason.INVALID_ARGUMENT: ("a field of the request is wrong", "Correct the field that the message names."),
    Reason.CONTEXT_TOO_LONG: ("prompt and output exceed the context", "Shorten the prompt or lower `max_tokens`."),
    Reason.MESSAGE_TOO_LARGE: ("the body is too large", "Send a smaller body, or raise `limits.message_bytes`."),
    Reason.UNSUPPORTED_ENCODING: ("the body is compressed in an unknown way", "Use `gzip`, `deflate` or no encoding."),
    Reason.MODEL_NOT_FOUND: ("the router serves another model", "Use a name that `/v1/models` lists."),
    Reason.UNAUTHENTICATED: ("the API key or the token is missing or wrong", "Send a valid key or token."),
    Reason.NOT_FOUND: ("there is no such path, worker or request", "Check the name in the call."),
    Reason.METHOD_NOT_ALLOWED: ("the path has no such method", "Use a method that the header `allow` names."),
    Reason.QUEUE_FULL: ("the queue is full for this tenant", "Wait for `Retry-After`, then send the request again."),
    Reason.RATE_LIMITED: ("a limit of the API key is reached", "Wait for `Retry-After`, or raise the key's limit."),
    Reason.DEADLINE_TOO_SHORT: ("the wait would exceed the deadline", "Raise the deadline, or retry later."),
    Reason.OVERLOADED: ("no worker had capacity in time", "Wait for `Retry-After`. Add workers if it lasts."),
    Reason.SLOW_CLIENT: ("the client did not read its stream", "Read the stream faster, or raise `limits.unread`."),
    Reason.NO_WORKERS: ("no pair of workers is routable", "Retry later. Run `millrace workers` to see why."),
    Reason.NOT_READY: ("the worker or router is not ready", "Retry later. Check the state in `millrace workers`."),
    Reason.DRAINING: ("the process is about to end", "Retry: another router or worker takes the request."),
    Reason.DEADLINE_EXCEEDED: ("the client's deadline passed", "Raise the deadline, or ask for fewer tokens."),
    Reason.CANCELLED: ("the client cancelled", "Check why the client closed, if it did not mean to."),
    Reason.EPOCH_CHANGED: ("a worker restarted", "Retry: the router does so by itself before the first token."),
    Reason.LAYOUT_MISMATCH: ("two workers have different KV layouts", "Set equal model, page size and KV dtype."),
    Reason.KV_NOT_FOUND: ("the KV pages are gone", "Retry. Read *leases expire* if it lasts."),
    Reason.KV_EXPIRED: ("the decode worker came too late", "Retry. Read *leases expire* if it lasts."),
    Reason.KV_MISMATCH: ("the pages hold other tokens", "Report it, with the logs of both workers."),
    Reason.NOT_FINITE: ("logits are NaN or infinite", "Check the GPU; if all workers have it, the weights."),
    Reason.TRANSFER_FAILED: ("reading KV pages failed", "Retry. Check the network if one pod has all failures."),
    Reason.WORKER_LOST: ("the worker died", "Retry. Read `kubectl logs POD --previous`."),
    Reason.STALLED: ("the worker is silent", "Retry. Read *when a rank hangs* if it lasts."),
    Reason.INTERNAL: ("a fault of Millrace", "Report it, with the router's log."),
}


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split(" | ")
    lines = [head, "---|" * (len(columns) - 1) + "---"]
    lines += [" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    return "".join(f"|{line}|\n" if line.startswith("---") else f"| {line} |\n" for line in lines)


def errors() -> str:
    rows = []
    for reason, row in TABLE.items():
        cause, action = ACTIONS[reason]
        retried = "yes" if row.retry_elsewhere else ""
        rows.append((f"`{reason}`", str(row.http), f"`{row.code.name}`", cause, retried, action))
    return table("reason | HTTP | gRPC | cause | router retries | what to do", rows)


def metric_table(catalogue: Iterable[metrics.Metric]) -> str:
    kinds = {metrics.Counter: "counter", metrics.Gauge: "gauge"}
    return table(
        "metric | type | labels | meaning",
        (
            (f"`{row.name}`", kinds.get(row.kind, "histogram"), ", ".join(f"`{it}`" for it in row.labels), row.help)
            for row in catalogue
        ),
    )


def settings(model: type[BaseModel]) -> str:
    return table("key | default | limits | meaning", _settings(model, ""))


def _settings(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    words = comments(model)
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            yield f"`{prefix}{name}`", _default(field), _limits(field), words.get(name, "")
        else:
            yield from _settings(section, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The model of a section, which may be optional. A list of models is a plain key."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    models = [it for it in options if isinstance(it, type) and issubclass(it, BaseModel)]
    return models[0] if len(models) == 1 and set(options) <= {*models, type(None)} else None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ("", (), {}):
        return ""
    value = value.value if isinstance(value, enum.Enum) else value
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _limits(field: FieldInfo) -> str:
    """Bounds and choices. The longest time is left out: it is that of every setting in seconds."""
    kind = field.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        choices = tuple(item.value for item in kind)
    found = {text: getattr(item, key) for item in field.metadata for key, text in BOUNDS.items() if hasattr(item, key)}
    told = [text for text in found if found[text] != LONGEST_S and not (text == "at least" and "above" in found)]
    return ", ".join([*(f"{text} {found[text]:.9g}" for text in told), *(f"`{choice}`" for choice in choices)])


@functools.cache
def comments(model: type[BaseModel]) -> Mapping[str, str]:
    """What stands beside each field in the source of its class, or in the lines of comment above it."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base is BaseModel or not issubclass(base, BaseModel):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                beside = re.search(r"  # (.*)$", lines[node.end_lineno - 1])  # type: ignore[operator]
                above = list(_above(lines, node.lineno - 2))
                found[node.target.id] = beside[1] if beside else " ".join(reversed(above))
    return found


def _above(lines: list[str], number: int) -> Iterator[str]:
    while number >= 0 and lines[number].strip().startswith("# "):
        yield lines[number].strip()[2:]
        number -= 1


BLOCKS: Mapping[str, Callable[[], str]] = {
    "errors": errors,
    "metrics-router": lambda: metric_table(metrics.ROUTER),
    "metrics-worker": lambda: metric_table(metrics.WORKER),
    "metrics-process": lambda: metric_table(metrics.PROCESS),
    "settings-router": lambda: settings(RouterConfig),
    "settings-worker": lambda: settings(WorkerConfig),
}


def render(page: Path) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[4]}", page.read_text())


def pages() -> list[Path]:
    return [page for page in sorted(PAGES.glob("*.md")) if BLOCK.search(page.read_text())]


def main() -> None:
    for page in pages():
        page.write_text(render(page))


if __name__ == "__main__":
    main()
