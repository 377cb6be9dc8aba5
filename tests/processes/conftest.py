"""What the tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import troupe
from tests.processes.nursery import WarmProcess


@pytest.fixture(scope="module")
def stage() -> Iterator[WarmProcess]:
    """A stage for one troupe after the other."""
    with troupe.stage() as warm:
        yield warm
