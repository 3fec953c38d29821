"""How many examples a property is tried with: few by default, MILLRACE_EXAMPLES times as many before a release."""

import os
from collections.abc import Collection
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("MILLRACE_EXAMPLES", "1"))


def examples(few: int, suppress_health_check: Collection[HealthCheck] = (), **options: Any) -> settings:
    """Settings of a property, beside those of tests/conftest.py."""
    checks = [HealthCheck.too_slow, *suppress_health_check]
    return settings(max_examples=few * TIMES, suppress_health_check=checks, **options)
