"""The folder of the disk tier, which can run full, lose pages and tear them while workers use it."""

import contextlib
import errno
import random
import subprocess
from pathlib import Path

FILLER = "filler"
PIECE = bytes(64 << 10)


class SharedDisk:
    """A file system of its own where this machine lets us mount one; else a plain folder, which never runs full."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "millrace", str(folder)]
        try:
            self.bounded = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        except OSError:
            self.bounded = False

    def fill(self) -> None:
        """Until nothing can be written any more."""
        assert self.bounded, "it would fill the machine's disk"
        with contextlib.suppress(OSError), (self.folder / FILLER).open("ab", buffering=0) as file:
            while file.write(PIECE):
                pass

    def is_full(self) -> bool:
        try:
            (self.folder / "probe").write_bytes(PIECE)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return True
        finally:
            (self.folder / "probe").unlink(missing_ok=True)
        return False

    def free(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)

    def pages(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and path.name != FILLER]

    def lose(self) -> None:
        """All pages."""
        for path in self.pages():
            path.unlink(missing_ok=True)

    def tear(self, rng: random.Random) -> None:
        """Half of the pages end in their middle."""
        for path in self.pages():
            if rng.random() < 0.5:
                with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                    file.truncate(path.stat().st_size // 2)

    def close(self) -> None:
        if self.bounded:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)
