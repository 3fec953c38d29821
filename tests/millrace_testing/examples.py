"""How many examples a property is tried with: few by default, MILLRACE_EXAMPLES times as many before a release."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

TIMES = int(os.environ.get("MILLRACE_EXAMPLES", "1"))


def examples(few: int, **options: Any) -> settings:
    """Settings of a property, without a limit for one example: machines are busy."""
    return settings(max_examples=few * TIMES, deadline=None, **options)
