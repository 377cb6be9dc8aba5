"""What the tests of the line share."""

from __future__ import annotations

from tests.client.conftest import neighbour

__all__ = ["neighbour"]
