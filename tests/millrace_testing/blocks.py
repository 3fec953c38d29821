"""Blocks (millrace_common/page_hash.py) of pages that nobody has computed."""

from millrace_common.page_hash import BLOCK_BYTES


def block(number: int) -> bytes:
    return number.to_bytes(BLOCK_BYTES, "big")


def blocks(*numbers: int) -> list[bytes]:
    return [block(number) for number in numbers]
