"""The one table of errors: the meaning of a reason on gRPC, on HTTP, and for a router that decides about a retry.

A `MillraceError` is raised where a request is refused or fails; the servers' edges turn it into a status
(`to_status`) or an OpenAI-style HTTP answer (`http_body`), and clients turn a status back into it (`from_rpc_error`).
"""

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from google.protobuf import any as protobuf_any
from google.protobuf import duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from millrace_common.json_values import JsonObject
from millrace_common.log import PER_REQUEST
from millrace_common.quoted import cut, printable
from millrace_common.reasons import Reason

DOMAIN = "millrace"
MAX_MESSAGE_BYTES = 1_000  # in a status it travels twice, once percent-encoded, in 8 KiB of headers
MAX_PARAM_BYTES = 200


@dataclass(frozen=True, slots=True)
class Row:
    code: grpc.StatusCode
    http: int
    openai_type: str
    openai_code: str = ""  # by which OpenAI's clients know it; empty: the reason
    retry_elsewhere: bool = False  # another worker, or a fresh attempt, may succeed
    retry_after_s: float = 0.0  # advice to the client; 0 = none


_S = grpc.StatusCode
TABLE: dict[Reason, Row] = {
    Reason.INVALID_ARGUMENT: Row(_S.INVALID_ARGUMENT, 400, "invalid_request_error"),
    Reason.CONTEXT_TOO_LONG: Row(_S.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"),
    Reason.MESSAGE_TOO_LARGE: Row(_S.INVALID_ARGUMENT, 413, "invalid_request_error"),
    Reason.UNSUPPORTED_ENCODING: Row(_S.INVALID_ARGUMENT, 415, "invalid_request_error"),
    Reason.MODEL_NOT_FOUND: Row(_S.NOT_FOUND, 404, "invalid_request_error"),
    Reason.UNAUTHENTICATED: Row(_S.UNAUTHENTICATED, 401, "authentication_error"),
    Reason.NOT_FOUND: Row(_S.NOT_FOUND, 404, "invalid_request_error"),
    Reason.METHOD_NOT_ALLOWED: Row(_S.UNIMPLEMENTED, 405, "invalid_request_error", "method_not_supported"),
    Reason.QUEUE_FULL: Row(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retry_after_s=1.0),
    Reason.RATE_LIMITED: Row(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retry_after_s=1.0),
    Reason.DEADLINE_TOO_SHORT: Row(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retry_after_s=1.0),
    Reason.OVERLOADED: Row(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retry_elsewhere=True, retry_after_s=1.0),
    Reason.SLOW_CLIENT: Row(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", retry_after_s=1.0),
    Reason.NO_WORKERS: Row(_S.UNAVAILABLE, 503, "server_error", retry_after_s=1.0),
    Reason.NOT_READY: Row(_S.UNAVAILABLE, 503, "server_error", retry_elsewhere=True, retry_after_s=1.0),
    Reason.DRAINING: Row(_S.UNAVAILABLE, 503, "server_error", retry_elsewhere=True, retry_after_s=1.0),
    Reason.DEADLINE_EXCEEDED: Row(_S.DEADLINE_EXCEEDED, 408, "timeout_error"),
    Reason.CANCELLED: Row(_S.CANCELLED, 499, "cancelled"),
    Reason.EPOCH_CHANGED: Row(_S.FAILED_PRECONDITION, 503, "server_error", retry_elsewhere=True),
    Reason.LAYOUT_MISMATCH: Row(_S.FAILED_PRECONDITION, 503, "server_error"),
    Reason.KV_NOT_FOUND: Row(_S.NOT_FOUND, 503, "server_error", retry_elsewhere=True),
    Reason.KV_EXPIRED: Row(_S.FAILED_PRECONDITION, 503, "server_error", retry_elsewhere=True),
    Reason.KV_MISMATCH: Row(_S.FAILED_PRECONDITION, 503, "server_error", retry_elsewhere=True),
    Reason.NOT_FINITE: Row(_S.INTERNAL, 500, "server_error", retry_elsewhere=True),
    Reason.TRANSFER_FAILED: Row(_S.UNAVAILABLE, 503, "server_error", retry_elsewhere=True),
    Reason.WORKER_LOST: Row(_S.UNAVAILABLE, 503, "server_error", retry_elsewhere=True),
    Reason.STALLED: Row(_S.UNAVAILABLE, 503, "server_error", retry_elsewhere=True),
    Reason.INTERNAL: Row(_S.INTERNAL, 500, "server_error"),
}


class MillraceError(Exception):
    """A failure with a reason from the table. `param` names the offending request field, if one.

    The message quotes a part of what a client sent (quoted.py). It is cut at MAX_MESSAGE_BYTES whatever it quotes.
    """

    def __init__(
        self, reason: Reason | str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = Reason.__members__.get(reason, Reason.INTERNAL)
        self.message = _bounded(message, MAX_MESSAGE_BYTES)
        self.param = param and _bounded(param, MAX_PARAM_BYTES)
        self.retry_after_s = self.row.retry_after_s if retry_after_s is None else retry_after_s

    @classmethod
    def of(cls, error: Exception, log: logging.Logger | None = None, what: str = "", *facts: object) -> "MillraceError":
        """The error itself; INTERNAL of any other exception, a fault of ours in `what`, which is logged."""
        if isinstance(error, MillraceError):
            return error
        if log is not None:
            log.error(what, *facts, exc_info=error, extra=PER_REQUEST, stacklevel=2)
        return cls(Reason.INTERNAL, f"{type(error).__name__}: {error}")

    @property
    def row(self) -> Row:
        return TABLE[self.reason]

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    def to_status(self) -> grpc.Status:
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        if self.param:
            info.metadata["param"] = self.param
        details: list[Message] = [info]
        if self.retry_after_s > 0:
            delay = duration.from_milliseconds(round(self.retry_after_s * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = map(protobuf_any.pack, details)
        code = code_pb2.Code.Value(self.row.code.name)
        return rpc_status.to_status(status_pb2.Status(code=code, message=self.message, details=packed))

    def http_body(self) -> JsonObject:
        """The error object of the OpenAI API."""
        return {
            "error": {
                "message": self.message,
                "type": self.row.openai_type,
                "param": self.param,
                "code": self.row.openai_code or self.reason.lower(),
            }
        }


def _bounded(text: str, most: int) -> str:
    """At most so many bytes of UTF-8. Texts of libraries may have what no UTF-8 has, or no terminal should get."""
    return printable(cut(text, most)).encode()[:most].decode(errors="ignore")


Path = tuple[str | int, ...]  # of a field in a request: names, and positions in arrays
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_MAX_NAME = 64  # characters of a name that a client made up
_MAX_PATH = 150


def spelled(path: Path) -> str:
    """Return `messages[0].content[1].text`. A name that is no plain word is quoted: `logit_bias["50256"]`."""
    text = ""
    for part in path:
        name = str(part)[:_MAX_NAME]
        if isinstance(part, str) and _PLAIN.fullmatch(name):
            text += f".{name}" if text else name
        else:
            text += f"[{name if isinstance(part, int) else json.dumps(name)}]"
    return cut(text, _MAX_PATH)


class FieldError(MillraceError):
    """A request is refused because of the field at `path`, with which the message begins.

    `words` go on with the message. Those that are paths name other fields.
    """

    def __init__(self, path: str | Path, *words: str | Path, reason: Reason = Reason.INVALID_ARGUMENT) -> None:
        self.path = (path,) if isinstance(path, str) else path
        self.words = words
        name = spelled(self.path)
        rest = "".join(word if isinstance(word, str) else spelled(word) for word in words)
        super().__init__(reason, f"{name} {rest}", param=name)

    def renamed(self, origins: Mapping[Path, Path]) -> "FieldError":
        """Return the error about the fields that these come from. `origins`: of paths, and so of all that begin with
        them; the longest that fits holds. A path that is not there stays as it is.
        """
        words = (word if isinstance(word, str) else _origin(word, origins) for word in self.words)
        return FieldError(_origin(self.path, origins), *words, reason=self.reason)


def check_count(path: str | Path, count: int, most: int) -> None:
    """Raises FieldError. A list that somebody sends is counted before anything is made of it."""
    if count > most:
        raise FieldError(path, f"must have at most {most} entries, not {count}")


def _origin(path: Path, origins: Mapping[Path, Path]) -> Path:
    for size in range(len(path), 0, -1):
        if (origin := origins.get(path[:size])) is not None:
            return origin + path[size:]
    return path


_BY_CODE = {
    _S.CANCELLED: Reason.CANCELLED,
    _S.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    _S.INTERNAL: Reason.TRANSFER_FAILED,  # gRPC's own, about one stream that broke: our servers send details
    _S.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
    _S.NOT_FOUND: Reason.NOT_FOUND,
    _S.RESOURCE_EXHAUSTED: Reason.OVERLOADED,
    _S.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    _S.UNAVAILABLE: Reason.WORKER_LOST,
}


def from_rpc_error(error: grpc.RpcError) -> MillraceError:
    """The error that the peer raised; for a status without our details, the nearest reason. It is of one call: whether
    the peer lives, only its watch knows.
    """
    status: status_pb2.Status | None = None
    with contextlib.suppress(ValueError):  # the transport replaced the code, so the details are of another error
        status = rpc_status.from_call(error)
    reason: Reason | str | None = None
    param, retry_after_s = None, None
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, param = info.reason, info.metadata.get("param")
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    message = error.details() or error.code().name
    return MillraceError(
        reason or _BY_CODE.get(error.code(), Reason.INTERNAL), message, param=param, retry_after_s=retry_after_s
    )
