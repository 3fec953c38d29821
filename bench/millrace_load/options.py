"""Command lines of benches: every number and form is checked before any work.

Options from the fields of a dataclass: `streams: Annotated[int, "help"] = 256` is --streams; 0 where its default is.
"""

import argparse
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class CommandLine(argparse.ArgumentParser):
    """An int is at least 1, a float above 0; `number` is the type of others. Without `about` the help has defaults."""

    def __init__(self, name: str, about: str | None = None, epilog: str | None = None) -> None:
        form = argparse.RawDescriptionHelpFormatter if about else argparse.ArgumentDefaultsHelpFormatter
        super().__init__(prog=name, description=about, epilog=epilog, formatter_class=form)
        self.register("type", int, number(int, 1))
        self.register("type", float, number(float, math.ulp(0.0)))


def number(kind: type[int | float], least: float = 0, most: float = math.inf) -> Callable[[str], int | float]:
    """The type of an option that may be 0. `least`: the smallest positive float means above 0."""

    def read(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most or value == math.inf:
            low = "above 0" if 0 < least < 1 else f"at least {least}"
            raise argparse.ArgumentTypeError(f"must be {low if most == math.inf else f'{least} to {most}'}, not {text}")
        return value

    return functools.update_wrapper(read, kind, ("__name__",), ())  # argparse names it


def reader(parse: Callable[[str], Any], *, keep: bool = False) -> Callable[[str], Any]:
    """The type of an option that `parse` reads or refuses by ValueError. `keep`: the value is the text."""

    def read(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text if keep else value

    return read


def matching(pattern: str, name: str, *, keep: bool = True) -> Callable[[str], Any]:
    """The type of an option in the form of this name: its numbers, or the text."""

    def parse(text: str) -> tuple[int, ...]:
        if not (found := re.fullmatch(pattern, text)):
            raise ValueError(f"must be {name}, not {text!r}")
        return () if keep else tuple(map(int, found.groups()))

    return reader(parse, keep=keep)


def form(name: str, *, keep: bool = False) -> Any:
    """For an option of numbers above 0 in this form, such as BATCHxCONTEXT."""
    pattern = re.sub("[A-Z]+", r"([1-9]\\d*)", re.escape(name))
    return {"type": matching(pattern, f"{name}, above 0", keep=keep), "metavar": name}


setting = matching(r"(?s)[\w.]+=.*", "KEY=VALUE")
SET: Any = {"default": [], "type": setting, "metavar": "KEY=VALUE"}
device = matching(r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N")


@reader
def file(text: str) -> str:
    if text and not Path(text).is_file():
        raise ValueError(f"there is no file {text}")
    return text


@reader
def checkpoint(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        raise ValueError(f"there is no {text}/config.json")
    return Path(text)


@reader
def folder(text: str) -> Path:
    """To write into; it may come to be."""
    path = Path(text).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"nothing can be written in {text}")
    return Path(text)


@reader
def output(text: str) -> Path:
    """A file to write."""
    if Path(text).is_dir():
        raise ValueError(f"{text} is a folder")
    folder(str(Path(text).parent))
    return Path(text)


def add_options(
    parser: argparse.ArgumentParser, settings: type[Any], former: Mapping[str, Sequence[str]] | None = None
) -> None:
    """An option for each field; its metadata is the help, then perhaps the type. `former`: by field, older names."""
    hints = get_type_hints(settings, include_extras=True)
    for item in fields(settings):
        kind, text, *types = get_args(hints[item.name])
        kind = next((one for one in get_args(kind) if NoneType in get_args(kind)), kind)  # of `Path | None`
        flag = f"--{item.name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif get_origin(kind) is Literal:
            parser.add_argument(flag, default=item.default, choices=get_args(kind), help=text)
        elif get_origin(kind) is tuple:
            item_type = get_args(kind)[0]
            metavar, nargs = "KEY=VALUE" if item_type is str else "N", "+" if item.default else "*"
            item_type = setting if item_type is str else item_type
            parser.add_argument(flag, default=item.default, nargs=nargs, type=item_type, metavar=metavar, help=text)
        else:
            names = (former or {}).get(item.name, ())
            read = types[0] if types else number(kind) if kind in (int, float) and not item.default else kind
            parser.add_argument(flag, *names, default=item.default, type=read, help=text)
