"""Messages as a later version of ours says them."""

from typing import TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

FIELD = b"\xfa\x7f\x05later"  # 2047, a text
M = TypeVar("M", bound=Message)


def later(message: M) -> M:
    """With an unknown field in itself and in each message below."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for part in value if field.is_repeated else [value]:
                later(part)
    message.MergeFromString(FIELD)
    return message
