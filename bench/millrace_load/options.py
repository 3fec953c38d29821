"""Command-line options from the fields of a dataclass: `streams: Annotated[int, "help"] = 256` is --streams."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def add_options(
    parser: argparse.ArgumentParser, settings: type[Any], former: Mapping[str, Sequence[str]] | None = None
) -> None:
    """An option for each field; its metadata is the help. `former`: by field, older names of an option."""
    hints = get_type_hints(settings, include_extras=True)
    for item in fields(settings):
        kind, text = get_args(hints[item.name])
        kind = next((one for one in get_args(kind) if NoneType in get_args(kind)), kind)  # of `Path | None`
        flag = f"--{item.name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif get_origin(kind) is Literal:
            parser.add_argument(flag, default=item.default, choices=get_args(kind), help=text)
        elif get_origin(kind) is tuple:
            item_type = get_args(kind)[0]
            metavar, nargs = "KEY=VALUE" if item_type is str else "N", "+" if item.default else "*"
            parser.add_argument(flag, default=item.default, nargs=nargs, type=item_type, metavar=metavar, help=text)
        else:
            names = (former or {}).get(item.name, ())
            parser.add_argument(flag, *names, default=item.default, type=kind, help=text)
