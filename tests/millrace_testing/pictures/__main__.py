"""`make pictures`: record a local cluster for five minutes, and draw every board.

--recording draws again what was recorded before.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from millrace_testing.paths import ROOT
from millrace_testing.pictures.draw import Painter
from millrace_testing.pictures.record import Recording, record

OUT = ROOT / "docs" / "figures"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make pictures", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--recording", type=Path, metavar="FILE", help="draw this one instead")
    arguments = parser.parse_args(argv)
    if arguments.recording is None:
        folder = Path(tempfile.mkdtemp(prefix="millrace-boards-"))
        arguments.recording = folder / "recording.json"
        arguments.recording.write_text(asyncio.run(record(folder)).to_json())
    recording = Recording(**json.loads(arguments.recording.read_text()))
    painter = Painter(recording)
    for board in recording.boards:
        painter.save(board, arguments.out / f"{board['uid']}.png")


if __name__ == "__main__":
    main()
