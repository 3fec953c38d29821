"""Real processes: a router, prefill and decode workers, NIXL between them. Each module says which cluster it wants."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from millrace_testing.certificates import few_authorities  # noqa: F401
from millrace_testing.command import millrace  # noqa: F401
from millrace_testing.kube_server import KubeServer


@pytest.fixture
async def server() -> AsyncIterator[KubeServer]:
    async with KubeServer() as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
