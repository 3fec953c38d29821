"""Fixtures of a whole module, opened once."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest_asyncio


def shared(make: Callable[[], AbstractAsyncContextManager[Any]]) -> Any:
    """A fixture: what `make` opens, for all tests of a module, which leave it as they found it."""

    async def opened() -> AsyncIterator[Any]:
        async with make() as found:
            yield found

    return pytest_asyncio.fixture(opened, loop_scope="module", scope="module")
