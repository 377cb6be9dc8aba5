"""Fixtures for checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.fixtures.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server; each test makes its own buckets there."""
    with S3Server(tmp_path_factory.mktemp("weed")) as server:
        yield server
