"""Logging for every process: one line format, with the process's name and, inside a request, the request's id.

Clients choose parts of what is logged. So a message is one line, in which what cannot be printed is escaped: no client
makes a line of its own. Text of several lines (tracebacks, tables of `extra={"lines": text}`) follows, each line behind
`MARGIN`. What requests and connections can cause at any rate is written once per second and place in the code.
"""

import contextlib
import contextvars
import logging
import math
import sys
from collections.abc import Iterator

from millrace_common.quoted import cut, printable

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("millrace_request_id", default="")

LONGEST_ID = 128  # characters of it in a line
LONGEST = 4000  # characters of another text in a line
MARGIN = "    | "
PERIOD_S = 1.0  # between two lines of the same place
PER_REQUEST = {"per_request": True}  # `extra` of a call outside a request's context that requests or connections cause
OF_CONNECTIONS = ("asyncio", "grpc", "uvicorn")  # libraries that log what is wrong with a client's connection


class Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname).1s {process} %(name)s%(request)s: %(text)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        current = printable(cut(request_id.get(), LONGEST_ID))
        record.request = f" [{current}]" if current else ""
        record.asctime = self.formatTime(record, self.datefmt)
        count = getattr(record, "left_out", 0)
        record.text = printable(cut(record.getMessage(), LONGEST)) + (
            f" ({count} more were not logged)" if count else ""
        )
        further = [getattr(record, "lines", ""), record.stack_info or ""]
        if record.exc_info:
            further.append(self.formatException(record.exc_info))
        lines = (line for text in further for line in text.split("\n") if line)
        return "\n".join([self.formatMessage(record), *(MARGIN + printable(cut(line, LONGEST)) for line in lines)])


class Sparing(logging.Filter):
    """Lets one record per `PERIOD_S` and place pass, of those that clients can cause. The next one that passes has the
    count of the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[object, tuple[float, int]] = {}  # by place: the time of the last one, and how many came since

    def filter(self, record: logging.LogRecord) -> bool:
        library = record.name.partition(".")[0] in OF_CONNECTIONS
        if not (library or request_id.get() or getattr(record, "per_request", False)):
            return True
        kind = record.exc_info[0] if record.exc_info else None
        place = record.pathname, record.lineno, kind
        last, count = self._seen.get(place, (-math.inf, 0))
        if 0 <= record.created - last < PERIOD_S:
            self._seen[place] = last, count + 1
            return False
        self._seen[place] = record.created, 0
        record.left_out = count
        return True


def setup(process: str, level: str = "INFO") -> None:
    """Log to stderr. `process` is the name in each line, for example "decode/rank0"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(process))
    handler.addFilter(Sparing())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for noisy in ("asyncio", "grpc", "httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


@contextlib.contextmanager
def survived(log: logging.Logger, what: str, *facts: object) -> Iterator[None]:
    """A fault of ours in the block is logged, and ends the block alone: whoever runs it serves others, too."""
    try:
        yield
    except Exception:
        log.exception(what, *facts, extra=PER_REQUEST, stacklevel=3)  # the place of the block
