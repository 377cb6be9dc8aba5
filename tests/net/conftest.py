"""Fixtures for tests of real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.net.recording_connections import Certificates, RecordingConnections


@pytest.fixture
async def connections() -> AsyncIterator[RecordingConnections]:
    made = RecordingConnections()
    yield made
    await made.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))
