"""Bodies of requests that are sent compressed."""

import zlib

from millrace_common.quoted import cut
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

GZIP, ZLIB, RAW = 31, 15, -15  # what zlib calls window bits. RAW: some clients send deflate without zlib's header
CODINGS = ("gzip", "deflate")


def decoded(body: bytes, content_encoding: str, most: int) -> bytes:
    """Return the body as it was before the encoding that the header names. No more than `most` bytes are decoded.

    Raises UNSUPPORTED_ENCODING, MESSAGE_TOO_LARGE, and INVALID_ARGUMENT for a body that is not what the header says.
    """
    named = [name.strip().lower() for name in content_encoding.split(",")]
    codings = [name.removeprefix("x-") for name in named if name not in ("", "identity")]
    if not codings:
        return body
    if len(codings) > 1 or codings[0] not in CODINGS:
        message = f"the body's content-encoding {cut(', '.join(codings))} is not supported; use {' or '.join(CODINGS)}"
        raise MillraceError(Reason.UNSUPPORTED_ENCODING, message)
    stream = zlib.decompressobj(_window(body, codings[0]))
    try:
        text = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise MillraceError(Reason.INVALID_ARGUMENT, f"the body is not valid {codings[0]}: {error}") from error
    if len(text) > most:
        raise MillraceError(Reason.MESSAGE_TOO_LARGE, f"the decoded body has more than {most} bytes, the limit")
    if not stream.eof or stream.unused_data:
        where = "goes on after" if stream.eof else "ends before"
        raise MillraceError(
            Reason.INVALID_ARGUMENT, f"the body is not valid {codings[0]}: it {where} the end of its data"
        )
    return text


def _window(body: bytes, coding: str) -> int:
    if coding == "gzip":
        return GZIP
    return ZLIB if body[:1] and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0 else RAW
