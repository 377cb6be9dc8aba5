"""What the tests of training data share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import small_disk as disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with disks.small_disk(tmp_path / "disk", 1) as disk:
        yield disk
