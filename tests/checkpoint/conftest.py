"""What the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.weed import Weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """An S3 server; each test makes its own buckets there."""
    with Weed(tmp_path_factory.mktemp("weed")) as server:
        yield server
