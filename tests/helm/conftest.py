"""Every test here that renders the chart needs a real helm; where none can be had it is skipped."""

import pytest
from millrace_chart.render import find_helm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("helm")
        if marker is not None:
            which = marker.args[0] if marker.args else "helm"
            if find_helm(which) is None:
                item.add_marker(pytest.mark.skip(reason=f"no {which} here: `make setup` could not install it"))
