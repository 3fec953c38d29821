"""Tables of benches that are data: the files of bench/data."""

from typing import Any

import jinja2
import yaml
from millrace_load.record import ROOT

FOLDER = ROOT / "bench" / "data"
TEXTS = tuple((FOLDER / "heldout.txt").read_text().splitlines())  # short ones, for perplexity
TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)


def read_data(name: str, **values: Any) -> Any:
    """What a file says. NAME.jinja is a template for which these are the values."""
    text = (FOLDER / name).read_text()
    return yaml.safe_load(TEMPLATES.from_string(text).render(values) if name.endswith(".jinja") else text)
