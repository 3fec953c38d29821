"""The error of a command that cannot do its work: one line for the user, and the exit code."""


class CommandError(Exception):
    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
