"""The error of a command that cannot do its work: one line for the user, and the exit code."""

import contextlib
from collections.abc import Iterator


class CommandError(Exception):
    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def told(*kinds: type[Exception], of: str = "", code: int = 2) -> Iterator[None]:
    """CommandError for these, about the option `of`."""
    try:
        yield
    except kinds as error:
        raise CommandError(f"{of}: {error}" if of else str(error), code) from error
