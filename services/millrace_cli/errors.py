"""The error of a command that cannot do its work: one line for the user, and the exit code."""

import contextlib
import os
import sys
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
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        raise CommandError(f"{of}: {why}" if of else why, code) from error


def flush_output() -> None:
    """Raises CommandError where standard output takes no more, such as on a full disk."""
    try:
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left once more
        raise CommandError(f"standard output: {error.strerror}") from error
