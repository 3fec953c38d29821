"""Short texts for measuring perplexity, written for this file in the manner of the training data's documentation."""

from pathlib import Path

TEXTS = tuple(Path(__file__).with_suffix(".txt").read_text().splitlines())
