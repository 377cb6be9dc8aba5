"""Fixtures for the systemd tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.conftest import certificates, connections
from tests.systemd.service_manager import FakeServiceManager, service_manager_in

__all__ = ["certificates", "connections", "manager"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeServiceManager]:
    with service_manager_in(tmp_path) as manager:
        yield manager
