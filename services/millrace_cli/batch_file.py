"""The batch files of OpenAI: one JSON object per line, requests in one file and answers in another."""

import json
from dataclasses import dataclass
from pathlib import Path

from millrace_common.json_values import Json

from millrace_cli.errors import CommandError, told

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
SHOWN = 10  # bad lines in a message


@dataclass(frozen=True, slots=True)
class Line:
    custom_id: str
    url: str
    body: bytes  # JSON


def requests(path: Path) -> list[Line]:
    """Raises CommandError with the numbers of all lines that cannot be sent."""
    lines: dict[str, Line] = {}
    bad: list[str] = []
    with told(OSError):
        data = path.read_bytes()
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = _request(json.loads(text))
            if line.custom_id in lines:
                raise ValueError(f"custom_id {line.custom_id!r} is used twice")
            lines[line.custom_id] = line
        except json.JSONDecodeError as error:
            bad.append(f"line {number}: is not JSON: {error.msg} at character {error.pos + 1}")
        except (ValueError, RecursionError) as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
        raise CommandError("\n".join([f"{path} cannot be sent:", *bad[:SHOWN], *more]), code=2)
    if not lines:
        raise CommandError(f"{path} has no requests", code=2)
    return list(lines.values())


def answered(path: Path) -> tuple[set[str], int]:
    """The custom ids that have an answer, and the size of all whole lines: a torn last line counts as not written."""
    data = path.read_bytes()
    size = data.rfind(b"\n") + 1
    ids = set()
    for number, text in enumerate(data[:size].splitlines(), 1):
        try:
            answer = json.loads(text)
            if answer["response"] is None and answer["error"] is None:
                raise ValueError
            ids.add(str(answer["custom_id"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            raise CommandError(
                f"{path} line {number} is not an answer of a batch; give another --out", code=2
            ) from None
    return ids, size


def _request(value: Json) -> Line:
    """Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be a text")
    if value.get("method") != "POST":
        raise ValueError("method must be POST")
    if url not in URLS:
        raise ValueError(f"url must be one of {', '.join(URLS)}, not {url!r}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream must be absent: a batch has whole answers")
    return Line(custom_id, url, json.dumps(body).encode())
