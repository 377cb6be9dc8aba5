"""What the tests of what systemd is told share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.net.conftest import certificates, ends
from tests.systemd.manager import Manager, at

__all__ = ["certificates", "ends", "manager"]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with at(tmp_path) as manager:
        yield manager
