"""Names of a protobuf enum's values for people."""

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def name_of(kind: EnumTypeWrapper, value: int) -> str:
    """WorkerState, WORKER_STATE_LOADING → "loading". A value that another version has added is its number.

    Args:
        kind: an enum of the stubs, whose first value ends in UNSPECIFIED.
    """
    known = kind.DESCRIPTOR.values_by_number
    prefix = known[0].name.removesuffix("UNSPECIFIED")
    return known[value].name.removeprefix(prefix).lower() if value in known else str(value)
