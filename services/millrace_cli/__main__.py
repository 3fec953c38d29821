"""The entry point of the command `millrace`."""

import os

TERMINATED = 143  # as a shell reports a command that SIGTERM ended


def main() -> None:
    from millrace_common.process_start import prepare

    prepare(os.environ, TERMINATED)

    from millrace_cli import app

    app.main()


if __name__ == "__main__":
    main()
