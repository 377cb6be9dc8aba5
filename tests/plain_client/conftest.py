"""What the tests of the line share."""

from __future__ import annotations

from tests.client.conftest import threaded_daemon

__all__ = ["threaded_daemon"]
