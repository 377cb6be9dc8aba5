"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.fork_server import ForkServer
from tests.processes.training_cluster import worker_fork_server


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """A fork server that the clusters of one module use in turn."""
    with worker_fork_server() as server:
        yield server
