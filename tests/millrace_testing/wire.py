"""Bytes that are nearly a message of a protobuf type, made from its descriptor: more than a generated class builds."""

import math
import struct

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

MOST_FIELDS, DEEPEST = 6, 5
HUGE = 1 << 17
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_NUMBERS = st.one_of(st.sampled_from([0, 1, 2, 5, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1]), st.integers(0, 300))
_REALS = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, math.inf, -math.inf, math.nan, 1e-45, 3e38]), st.floats(0, 2))
_TEXTS = st.one_of(
    st.text(max_size=20).map(str.encode),
    st.sampled_from([b"", b"user", b"assistant", b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"x" * HUGE, b"1e400"]),
    st.binary(max_size=20),
)
_FIXED = {
    FieldDescriptor.TYPE_FLOAT: "<f",
    FieldDescriptor.TYPE_DOUBLE: "<d",
    FieldDescriptor.TYPE_FIXED64: "<Q",
    FieldDescriptor.TYPE_FIXED32: "<I",
}


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, wire: int, content: bytes) -> bytes:
    """`content` of wire type BYTES comes without its length."""
    return varint(number << 3 | wire) + (varint(len(content)) if wire == BYTES else b"") + content


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, depth: int = 0) -> bytes:
    """Some fields of the type, in any order, repeated or not; now and then unknown ones, wrong types, and garbage."""
    parts: list[bytes] = []
    for _ in range(draw(st.integers(0, MOST_FIELDS))):
        odd = draw(st.integers(0, 30))
        if odd == 0 or not kind.fields:
            parts.append(field(draw(st.integers(1, 2**29 - 1)), BYTES, draw(_TEXTS)))
        elif odd == 1:
            parts.append(field(draw(st.sampled_from(list(kind.fields))).number, BYTES, draw(st.binary(max_size=8))))
        elif odd == 2:
            parts.append(draw(st.binary(max_size=8)))
        else:
            parts.append(draw(_one(draw(st.sampled_from(list(kind.fields))), depth)))
    return b"".join(parts)


def _one(of: FieldDescriptor, depth: int) -> st.SearchStrategy[bytes]:
    if of.message_type is not None:
        inner = messages(of.message_type, depth + 1) if depth < DEEPEST else st.just(b"")
        return inner.map(lambda content: field(of.number, BYTES, content))
    if of.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return _TEXTS.map(lambda text: field(of.number, BYTES, text))
    if (form := _FIXED.get(of.type)) is None:
        packed = of.is_repeated and not of.has_presence
        if packed:
            return st.lists(_NUMBERS, max_size=8).map(
                lambda numbers: field(of.number, BYTES, b"".join(map(varint, numbers)))
            )
        return _NUMBERS.map(lambda number: field(of.number, VARINT, varint(number)))
    wire = FIXED32 if struct.calcsize(form) == 4 else FIXED64
    values: st.SearchStrategy[float] = _REALS if form in ("<f", "<d") else _NUMBERS
    bits = 2 ** (8 * struct.calcsize(form))
    return values.map(lambda v: field(of.number, wire, struct.pack(form, v % bits if isinstance(v, int) else v)))
