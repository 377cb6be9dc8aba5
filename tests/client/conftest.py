"""What the tests of the client library share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.client.house import House, config_in
from tests.client.neighbour import Neighbour
from tests.client.proxy import Proxy


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A running daemon."""
    house = House(config_in(tmp_path))
    await house.open()
    yield house
    await house.close()


@pytest.fixture
async def proxy(house: House, tmp_path: Path) -> AsyncIterator[Proxy]:
    """Another way to the same daemon."""
    proxy = Proxy(tmp_path / "proxy.sock", house.config.socket)
    yield proxy
    await proxy.close()


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[Neighbour]:
    """A running daemon for a test without a loop."""
    neighbour = Neighbour(tmp_path)
    yield neighbour
    neighbour.close()
