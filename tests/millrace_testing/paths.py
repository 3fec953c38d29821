"""Folders of the source tree."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny"  # the trained checkpoint; vocabulary 1,024, of which 0 to 4 are special, and two heads
